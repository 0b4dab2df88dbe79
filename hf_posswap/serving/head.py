"""The head of a language model, which vLLM's Transformers backend puts on by itself."""

from __future__ import annotations

from typing import Any

import torch

from hf_posswap.testing.tiny import tiny_model

NAME = "lm_head"
"""What that backend calls it."""
_IDS = torch.arange(8)[None]  # [1, L]
_CLOSE = 1e-4


def head_name(model_class: Any) -> str:
    """Return what checkpoints of the stock class `model_class` call the head: "lm_head", or "embed_out" in GPT-NeoX.

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

    vLLM multiplies what the base model gives by the head's weights, by `logit_scale`, and caps it; what else a class
    does there (Granite divides) is left out by its Transformers backend. A tiny model of the class shows it, with the
    numbers of `config`.
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
