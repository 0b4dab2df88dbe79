"""The harness's model "posswap": checkpoints come through `hf_posswap.load`, and the length follows the swap."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.load import load
from hf_posswap.comparison.candidates import shell_of
from hf_posswap.errors import MissingDependencyError
from hf_posswap.evaluation.scoring import reach_of
from hf_posswap.patching.apply.patch_model import patch_model
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.auto_classes import TRUST
from hf_posswap.utils.devices import resolve_device
from hf_posswap.utils.threads import once, quiet_logger

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedModel

    from hf_posswap.schemes.base import Scheme

NAME = "posswap"
"""Of the model in the harness's registry."""
_OLDEST = "lm_eval>=0.4.12"


@once
def harness_model_class() -> type[HFLM]:
    """Return the harness's class for swapped models, after which `lm_eval.simple_evaluate(model="posswap")` knows it.

    In addition to the arguments of the harness's "hf" it takes `scheme`, a scheme or its name, which is put in without
    training, and `swap_length`, its maximum length. `revision` is passed on. The harness's arguments for quantization
    and adapters are not supported: load such a model and give it as `pretrained`. Code of a model or a tokenizer is run
    only with `trust_remote_code=True`.

    Raises:
        MissingDependencyError: lm_eval is not installed, or too old.
    """
    try:
        from lm_eval.api.registry import register_model
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingDependencyError("lm_eval", "lm-eval") from error
    except AttributeError as error:  # lm_eval before 0.4.10 looks for classes that transformers no longer has
        raise MissingDependencyError(_OLDEST, "lm-eval") from error
    if not hasattr(TaskManager, "load"):  # which reads .yaml files by their path
        raise MissingDependencyError(_OLDEST, "lm-eval")

    class PosswapLM(HFLM):
        """A causal model with its swap."""

        logits_cache: bool

        def __init__(
            self,
            pretrained: PreTrainedModel | str,
            *,
            scheme: Scheme | str | None = None,
            swap_length: int | None = None,
            trust_remote_code: bool = False,
            **more: Any,
        ) -> None:
            self._requested_length: int | None = more.get("max_length")
            default = "auto" if isinstance(pretrained, str) else pretrained.device
            device = resolve_device(more.pop("device", None) or default)
            revision = more.pop("revision", None)
            hub = {TRUST: trust_remote_code} | ({"revision": revision} if revision else {})
            dtype = more.pop("dtype", "auto")
            model: Any = load(pretrained, dtype=dtype, **hub) if isinstance(pretrained, str) else pretrained
            if scheme is not None:
                model = shell_of(model)
                patch_model(model, scheme, max_length=swap_length)
            tokenizer = more.pop("tokenizer", None) or (pretrained if isinstance(pretrained, str) else None)
            if isinstance(tokenizer, str):
                hub_options = hub if tokenizer == pretrained else {TRUST: trust_remote_code}
                tokenizer = load_tokenizer(tokenizer, **hub_options)
            # it warns of models that it did not load itself
            with quiet_logger("lm_eval.models.huggingface", logging.ERROR):
                super().__init__(pretrained=model.to(device), tokenizer=tokenizer, **more)

        @property
        def max_length(self) -> int:
            """Maximum input length: the requested one, else the swap's maximum length, else the model's."""
            return self._requested_length or length_of(self.model) or super().max_length

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
            """Return the log-likelihoods of whole texts, without the harness's cache of logits.

            That cache takes two windows of one batch with the same tokens for one, also where one of them is to be
            scored in full and of the other only the end, and then scores the wrong tokens.
            """
            kept, self.logits_cache = self.logits_cache, False
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm)
            finally:
                self.logits_cache = kept

    register_model(NAME)(PosswapLM)
    return PosswapLM


def length_of(model: PreTrainedModel) -> int | None:
    """Return the maximum length of the swap in `model`, or None without one.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> before = length_of(model)
        >>> model = patch_model(model, "rope", max_length=64)
        >>> before, length_of(model)
        (None, 64)
    """
    target = unwrap(model)
    carried = getattr(target, "_posswap", None)  # a record without a swap is not trusted
    swap_length, limit = None if carried is None else carried.plan.max_length, reach_of(target).limit
    return swap_length if swap_length is None or limit is None else min(swap_length, limit)
