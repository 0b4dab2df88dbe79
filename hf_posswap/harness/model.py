"""The harness's model "posswap": checkpoints come through `hf_posswap.load`, and the length follows the swap."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.checkpoints.load import load
from hf_posswap.comparison.candidates import shell_of
from hf_posswap.errors import MissingDependencyError
from hf_posswap.evaluation.reach import reach_of
from hf_posswap.patching.apply.patch_model import patch_model
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.auto_classes import TRUST
from hf_posswap.utils.threads import quiet_logger

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "posswap"
"""Of the model in the harness's registry."""


@functools.cache
def harness_model_class() -> Any:
    """Return the harness's class for swapped models, after which `lm_eval.simple_evaluate(model="posswap")` knows it.

    Beside what the harness's own "hf" takes it takes `scheme`, a scheme or its name, and `swap_length`, the tokens that
    it is meant for: it is then put in without training. `revision` is passed on where it is given; what concerns
    quantization and adapters of the harness is not taken: load such a model and give it as `pretrained`. Code that a
    model or a tokenizer brings is run with `trust_remote_code=True` alone.

    Raises:
        MissingDependencyError: lm_eval is not installed.
    """
    try:
        from lm_eval.api.registry import register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise MissingDependencyError("lm_eval", "lm-eval") from error

    class PosswapLM(HFLM):
        """A causal model with its swap."""

        def __init__(
            self,
            pretrained: Any,
            *,
            scheme: Any = None,
            swap_length: int | None = None,
            trust_remote_code: bool = False,
            **more: Any,
        ) -> None:
            device = torch.device(more.pop("device", None) or "cpu")
            revision = more.pop("revision", None)
            hub: dict[str, Any] = {TRUST: trust_remote_code} | ({"revision": revision} if revision else {})
            dtype = more.pop("dtype", "auto")
            model: Any = load(pretrained, dtype=dtype, **hub) if isinstance(pretrained, str) else pretrained
            if scheme is not None:
                model = shell_of(model)
                patch_model(model, scheme, max_length=swap_length)
            words = more.pop("tokenizer", None) or (pretrained if isinstance(pretrained, str) else None)
            if isinstance(words, str):
                own = hub if words == pretrained else {TRUST: trust_remote_code}
                words = load_tokenizer(words, instead="give tokenizer=", **own)
            with _only_errors("lm_eval.models.huggingface"):  # it warns of models that it did not load itself
                super().__init__(pretrained=model.to(device), tokenizer=words, **more)

        @property
        def max_length(self) -> int:
            """Tokens of the longest input: what was asked for, else what the swap is meant for, else the model's."""
            return self._max_length or length_of(self.model) or super().max_length

    register_model(NAME)(PosswapLM)
    return PosswapLM


@contextmanager
def _only_errors(name: str) -> Iterator[None]:
    with quiet_logger(name, logging.ERROR):
        yield


def length_of(model: PreTrainedModel) -> int | None:
    """Return the tokens that the swap in `model` is meant for; None: it carries none, or none that says.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> before = length_of(model)
        >>> model = patch_model(model, "rope", max_length=64)
        >>> before, length_of(model)
        (None, 64)
    """
    target = unwrap(model)
    carried: Any = getattr(target, "_posswap", None)  # what a record alone says is not believed
    meant, limit = None if carried is None else carried.plan.max_length, reach_of(target).limit
    return meant if meant is None or limit is None else min(meant, limit)
