"""The output head of a language model, which vLLM's Transformers backend adds itself."""

from __future__ import annotations

from typing import Any

import torch

from hf_posswap.testing.tiny import tiny_model

NAME = "lm_head"
"""Its name in that backend."""
_IDS = torch.arange(8)[None]  # [1, L]
_CLOSE = 1e-4


def head_name(model_class: Any) -> str:
    """Return the name of the head in checkpoints of `model_class`: "lm_head", or "embed_out" in GPT-NeoX.

    Example:
        >>> from transformers import GPTNeoXForCausalLM
        >>> head_name(GPTNeoXForCausalLM) in ("embed_out", "lm_head")
        True
    """
    model = tiny_model(model_class)
    head = model.get_output_embeddings()
    return next(path for path, module in model.named_modules() if module is head)


def head_problem(model_class: Any, config: Any) -> str | None:
    """Return why vLLM's head would not give the logits of `model_class`, as the rest of a sentence, or None.

    vLLM multiplies the output of the base model by the head's weights and by `logit_scale`, and applies soft-capping;
    its Transformers backend ignores anything else that a class does (Granite divides). A tiny model of the class with
    the numbers of `config` is used to detect it.
    """
    numbers: dict[str, Any] = {name: value for name, value in config.to_dict().items() if isinstance(value, float)}
    model = tiny_model(model_class, meta=False, **numbers)
    with torch.no_grad():
        expected = model(_IDS).logits
        logits = model.get_output_embeddings()(model.base_model(_IDS)[0]) * numbers.get("logit_scale", 1.0)
    cap = numbers.get("final_logit_softcapping")
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    if torch.allclose(logits, expected, atol=_CLOSE, rtol=_CLOSE):
        return None
    return f"{model_class.__name__} does more to its logits than vLLM's Transformers backend"
