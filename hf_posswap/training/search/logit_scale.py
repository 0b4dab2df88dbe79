"""Fitting the logit scale of a model without positions at a length beyond its own.

The scores of layers without positions are multiplied by 1 + c ln s, s being the length over the original one: DroPE,
https://arxiv.org/abs/2512.12167, where c is fitted to each model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.errors import SchemeError
from hf_posswap.evaluation import measure_losses
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.tools.scheme_values import logit_scale_of, set_logit_scale
from hf_posswap.schemes.common import checks
from hf_posswap.text.tokens import check_token_ids
from hf_posswap.training.search.fitness import leading_documents
from hf_posswap.utils.devices import evaluating
from hf_posswap.utils.progress import counted, reporter_for
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OWNER = "fit_logit_scale"
GOLDEN = (math.sqrt(5) - 1) / 2
COARSE = 8
"""Number of coarse steps in [0, maximum] before refinement around the best one."""


@dataclass(frozen=True, repr=False)
class LogitScaleFit(ResultView):
    """The result of `fit_logit_scale`.

    Attributes:
        logit_scale: c, the best tried value.
        losses: mean loss in nats per token for every tried c, including 0.0.
        length: tokens of each document.
    """

    logit_scale: float
    losses: dict[float, float]
    length: int

    def __str__(self) -> str:
        return (
            f"logit scale {self.logit_scale:.4g}: loss {self.losses[self.logit_scale]:.4f} nats per token at "
            f"{self.length} tokens, {self.losses[0.0]:.4f} without"
        )

    def _repr_facts(self) -> dict[str, object]:
        loss, without = self.losses[self.logit_scale], self.losses[0.0]
        return {"logit_scale": self.logit_scale, "loss": loss, "loss_without": without, "length": self.length}

    def _html_rows(self) -> list[tuple[str, str]]:
        rows = [(f"loss at {scale:.4g}", f"{loss:.4f}") for scale, loss in sorted(self.losses.items())]
        return [("logit scale", f"{self.logit_scale:.4g}"), ("length", f"{self.length} tokens"), *rows]


@alone(parameters=False)
def fit_logit_scale(
    model: PreTrainedModel,
    texts: object,
    length: int,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    maximum: float = 2.0,
    tolerance: float = 0.01,
    progress: bool | None = None,
) -> LogitScaleFit:
    """Return the c that minimizes the loss of a model without positions on `texts` at `length` tokens.

    [0, maximum] is searched in eight steps, and around the best of them by golden section; 0 is included, so that the
    result is never worse than no scale on these texts. The model is not changed: apply the result with
    `set_logit_scale`.

    Args:
        model: patched with `NoPE(logit_scale=0.0)` or `RNoPE(logit_scale=0.0)`, and already trained.
        texts: documents of at least `length` tokens: strings, or rows of token ids.
        length: beyond the original one, in tokens.
        tokenizer: the model's tokenizer, for strings.
        maximum: the largest c to try, > 0.
        tolerance: accuracy of c, > 0.
        progress: show a bar of the candidates; None: in a notebook and on a terminal, unless
            HF_HUB_DISABLE_PROGRESS_BARS or `disable_progress_bar` of transformers turns bars off.

    Raises:
        NotPatchedError: the model has no logit scale.
        SchemeError: the length is within the original one, or maximum or tolerance is invalid.
        DataError: texts are too short, or their ids belong to another model.
        ModelInUseError: a forward of the model is running, or another thread changes it.
        OptionError: `progress` is not True, False or None.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import NoPE, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, NoPE(logit_scale=0.0))
        >>> fit = fit_logit_scale(model, torch.arange(64).view(2, 32) % 11, 32)
        >>> fit.losses[fit.logit_scale] <= fit.losses[0.0]
        True
    """
    reporter = reporter_for(progress)
    before = logit_scale_of(model)
    target = unwrap(model)
    scheme: Any = applied_swap(target).plan.scheme
    original = scheme.original_length
    checks.length(OWNER, "length", length)
    if length <= original:
        raise SchemeError(f"{OWNER}: length must exceed the original {original} tokens, where nothing is scaled.")
    maximum = checks.number(OWNER, "maximum", maximum, above=0.0, maximum=1e6)
    tolerance = checks.number(OWNER, "tolerance", tolerance, above=0.0)
    documents = leading_documents(texts, tokenizer, length)
    check_token_ids(target, documents)
    losses: dict[float, float] = {}

    def loss(scale: float) -> float:
        if scale not in losses:
            set_logit_scale(model, scale)
            measured = measure_losses(target, documents, [length], one_pass=True)
            losses[scale] = float(measured[length].mean(dtype=np.float64))
            count(losses[scale])
        return losses[scale]

    total = _most_candidates(maximum, tolerance)
    with evaluating(target), counted(reporter, "fit_logit_scale: candidates", total) as count:
        try:
            best = _least(loss, maximum, tolerance)
        finally:
            set_logit_scale(model, before)
    return LogitScaleFit(best, losses, length)


def _most_candidates(maximum: float, tolerance: float) -> int:
    """Return the most candidates that `_least` tries: the coarse steps, then golden section, one more a step.

    Example:
        >>> tried = set()
        >>> _ = _least(lambda scale: (tried.add(scale), (scale - 0.9) ** 2)[1], 2.0, 0.01)
        >>> len(tried), _most_candidates(2.0, 0.01)
        (19, 19)
    """
    steps = math.ceil(math.log(tolerance * COARSE / (2 * maximum)) / math.log(GOLDEN))
    return COARSE + 1 + max(steps + 1, 0)


def _least(loss: Callable[[float], float], maximum: float, tolerance: float) -> float:
    """Return the minimizer of `loss` in [0, maximum], by coarse steps and golden section."""
    steps = [maximum * index / COARSE for index in range(COARSE + 1)]
    centre = min(steps, key=loss)
    low, high = max(0.0, centre - maximum / COARSE), min(maximum, centre + maximum / COARSE)
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    tried = [centre]
    while high - low > tolerance:
        tried += [left, right]
        if loss(left) <= loss(right):
            high, right = right, left
            left = high - GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + GOLDEN * (high - low)
    return min(tried, key=loss)
