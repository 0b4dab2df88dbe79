"""The cost of the swap within the original window. Metric `short_reg`.

Compared with the base on the same tokens: the change of the loss, the mean divergence KL(base || swapped) of the
next-token distributions, and how often both have the same argmax token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import DataError, NumericError
from hf_posswap.evaluation.scoring import Scorer, advice_if_not_finite
from hf_posswap.evaluation.statistics import NonInferiority, non_inferiority
from hf_posswap.utils.result_views import ResultView


@dataclass(frozen=True, repr=False)
class ShortDocument(ResultView):
    """Sums over the tokens of one document.

    Attributes:
        tokens: number of compared tokens.
        before: summed loss of the base, in nats.
        after: summed loss of the swapped model, in nats.
        divergence: KL(base || swapped), in nats.
        agreed: number of tokens with the same argmax.
    """

    tokens: int
    before: float
    after: float
    divergence: float
    agreed: int


@dataclass(frozen=True, repr=False)
class ShortRegression(ResultView):
    """The effect of the swap within the original window.

    Attributes:
        loss: the non-inferiority verdict, with the change of the mean loss in nats per token.
        divergence: mean KL(base || swapped), in nats per token.
        agreement: share of tokens with the same argmax.
    """

    loss: NonInferiority
    divergence: float
    agreement: float


def compare_short(base: Scorer, swapped: Scorer, document: np.ndarray, *, length: int | None = None) -> ShortDocument:
    """Return the differences of `swapped` from `base` on one document, one chunk of logits at a time.

    Args:
        base: scorer of the model before the swap.
        swapped: scorer of the model after it, with the same vocabulary and chunk size.
        document: token ids [L].
        length: tokens of its beginning to compare, within the original window; None: L.

    Raises:
        DataError: the models have different vocabularies.
        NumericError: logits are not finite.
        PositionRangeError: as `Scorer.nll`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> sums = compare_short(Scorer(model), Scorer(model), np.arange(8))
        >>> sums.tokens, sums.agreed, abs(sums.divergence) < 1e-5
        (7, 7, True)
    """
    length = len(document) if length is None else length
    ids = torch.from_numpy(document[None, :length].astype(np.int64))
    done = 0
    before = after = divergence = 0.0
    agreed = 0
    for old, new in zip(base.prefix_logits(document, length), swapped.prefix_logits(document, length), strict=True):
        if old.shape != new.shape:
            raise DataError(f"the models have different vocabularies: {old.shape[-1]} and {new.shape[-1]} tokens.")
        targets = ids[:, 1 + done : 1 + done + old.shape[1]].to(old.device)
        done += old.shape[1]
        p, q = functional.log_softmax(old[0].double(), -1), functional.log_softmax(new[0].double().to(old.device), -1)
        before, after = before + _target_loss(p, targets), after + _target_loss(q, targets)
        divergence += float((p.exp() * (p - q)).sum())
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    if not np.isfinite([before, after, divergence]).all():
        advice = advice_if_not_finite(swapped.model)
        raise NumericError(f"the models' logits are not finite within the original window; {advice}.")
    return ShortDocument(length - 1, before, after, divergence, agreed)


def _target_loss(log_probabilities: Tensor, targets: Tensor) -> float:
    """Return the summed loss of `targets` [1, K] under log-probabilities [K, V]."""
    return float(-log_probabilities.gather(-1, targets[0][:, None]).sum())


def short_regression(documents: Sequence[ShortDocument], *, margin: float = 0.02, seed: int = 0) -> ShortRegression:
    """Return whether the loss over documents is worse by more than `margin` nats per token.

    Args:
        documents: from `compare_short`.
        margin: tolerated difference in nats per token.
        seed: random seed of the bootstrap.

    Raises:
        DataError: there are no documents, or the margin is negative.

    Example:
        >>> same = ShortDocument(tokens=10, before=20.0, after=20.0, divergence=0.0, agreed=10)
        >>> regression = short_regression([same] * 8)
        >>> regression.loss.verdict, regression.agreement, short_regression([same] * 3).loss.verdict
        ('not worse', 1.0, 'no verdict')
    """
    counts = np.array([document.tokens for document in documents])
    before = np.array([document.before for document in documents])
    after = np.array([document.after for document in documents])
    loss = non_inferiority(before, after, counts, margin=margin, seed=seed)
    total = float(counts.sum())
    divergence = sum(document.divergence for document in documents) / total
    return ShortRegression(loss, divergence, sum(document.agreed for document in documents) / total)
