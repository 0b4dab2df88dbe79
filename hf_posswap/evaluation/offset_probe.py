"""The same passage at several positions, which reveals wrong configurations. Metric `offset_probe`.

With O the original window, a passage is read at offsets 0, O/2, O, 2 O and 4 O without context. The loss is constant if
only distances matter; with a table or sinusoids it shows up to which positions they work.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_posswap.errors import DataError
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.evaluation.statistics import ratio_interval
from hf_posswap.utils.result_views import ResultView


@dataclass(frozen=True, repr=False)
class OffsetScore(ResultView):
    """The loss at one offset.

    Attributes:
        offset: position of the passage's first token.
        loss: mean loss, in nats per token.
        change: difference from the first offset.
        low: lower end of the change's 95 % interval over passages, or None.
        high: upper end of the interval.
    """

    offset: int
    loss: float
    change: float
    low: float | None
    high: float | None


def offsets_of(window: int) -> list[int]:
    """Return the offsets 0, O/2, O, 2 O, 4 O of an original window O.

    Example:
        >>> offsets_of(512)
        [0, 256, 512, 1024, 2048]
    """
    return [0, window // 2, window, 2 * window, 4 * window]


def offset_losses(scorer: Scorer, passage: np.ndarray, offsets: Sequence[int]) -> np.ndarray:
    """Return the summed loss of `passage` at each offset, float64 [O], in nats.

    Args:
        scorer: the model's scorer.
        passage: token ids [L].
        offsets: positions of the passage's first token, at least 0.

    Raises:
        DataError: the model takes no position_ids, or an offset is negative.
        PositionRangeError: a position is beyond the model's table.
        NumericError: a loss is not finite.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> offset_losses(Scorer(model), np.arange(8), [0, 16]).shape
        (2,)
    """
    if "position_ids" not in inspect.signature(scorer.model.base_model.forward).parameters:
        raise DataError(f"{type(scorer.model).__name__} takes no position_ids: offset_probe cannot move its text.")
    if not offsets or min(offsets) < 0:
        raise DataError(f"offsets are positions of at least 0, got {list(offsets)}.")
    ids = torch.from_numpy(passage.astype(np.int64))[None]
    return np.array([scorer.nll(ids, start=offset).double().sum().item() for offset in offsets])


def offset_change(losses: np.ndarray, offsets: Sequence[int], tokens: int, *, seed: int = 0) -> list[OffsetScore]:
    """Return the loss at each offset and its change from the first, from the results of `offset_losses`.

    Args:
        losses: [N, O], in nats.
        offsets: the offsets of the columns.
        tokens: scored tokens of each passage.
        seed: random seed of the bootstrap.

    Raises:
        DataError: the shapes differ.

    Example:
        >>> [score.change for score in offset_change(np.array([[4.0, 6.0], [4.0, 8.0]]), [0, 9], tokens=2)]
        [0.0, 1.5]
    """
    if losses.ndim != 2 or losses.shape[1] != len(offsets):
        raise DataError(f"losses {losses.shape} do not have a column for each of {len(offsets)} offsets.")
    counts = np.full(len(losses), tokens)
    scores = []
    for offset, column in zip(offsets, losses.T, strict=True):
        low, high = ratio_interval(column - losses[:, 0], counts, seed=seed) or (None, None)
        change = float((column - losses[:, 0]).sum() / counts.sum())
        scores.append(OffsetScore(offset, float(column.sum() / counts.sum()), change, low, high))
    return scores
