"""What a way of reading found: by document, with intervals, less another way on the same questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posswap.evaluation import paired_change, ratio_interval
from recipes.studies.long_texts import Task, gains

CUT, MEAN = "cut at the window", "mean of windows"
INTERPOLATED, ROPE, NTK = "table, interpolated", "rope, distilled", "rope, distilled, by ntk"
CLAIMS = (
    ("reading on beats cutting the text", INTERPOLATED, CUT),
    ("RoPE beats an extended table", NTK, INTERPOLATED),
    ("RoPE needs its scaling", NTK, ROPE),
)
"""Of LongEmbed, each with the way that should find more and the other; its RoPE models were pretrained with it."""


@dataclass(frozen=True)
class Found:
    """One way of one seed on one task.

    Attributes:
        task: that was asked.
        ranks: of the right documents, one a question, [Q].
        vectors: of the documents where each has one, of length 1, [N, E]; None: each has several.
    """

    task: Task
    ranks: np.ndarray
    vectors: np.ndarray | None


def cells_of(
    seeds: Sequence[Sequence[Found]], cut: Sequence[Found], mean: Sequence[Found], window: int
) -> list[dict[str, Any]]:
    """Return what one way found, a cell a task and length.

    A document's score is the mean over its questions and over seeds; the unit of every interval is the document.

    Args:
        seeds: of the way, by seed, the tasks in one order.
        cut: of the base that reads the first window alone, the tasks in the same order.
        mean: of the base that gives the mean of the vectors of all windows, likewise.
        window: of the base, in tokens.
    """
    return [
        {
            "task": one.task.name,
            "length": one.task.length,
            "documents": len(one.task.documents),
            "questions": len(one.task.questions),
            "accuracy": _with_interval(_accuracy(of_seeds)),
            "by_document": _accuracy(of_seeds).tolist(),
            "ndcg": _with_interval(_by_document(of_seeds, lambda found: gains(found.ranks))),
            "inside": _where(of_seeds, window, beyond=False),
            "beyond": _where(of_seeds, window, beyond=True),
            "less_cut": _change(_accuracy([one_cut]), _accuracy(of_seeds)),
            "less_mean": _change(_accuracy([one_mean]), _accuracy(of_seeds)),
            "by_seed": [float((found.ranks == 1).mean()) for found in of_seeds],
        }
        for of_seeds, one_cut, one_mean in zip(zip(*seeds, strict=True), cut, mean, strict=True)
        for one in of_seeds[:1]
    ]


def near_the_base(seeds: Sequence[Sequence[Found]], cut: Sequence[Found], window: int) -> float | None:
    """Return the mean cosine of the vectors of documents of one window to the base's; None: there are several each."""
    found = [
        (ours.vectors * theirs.vectors).sum(axis=1)
        for of_seed in seeds
        for ours, theirs in zip(of_seed, cut, strict=True)
        if ours.task.length == window and ours.vectors is not None and theirs.vectors is not None
    ]
    return float(np.concatenate(found).mean()) if found else None


def verdicts(rows: Sequence[dict[str, Any]], length: int) -> Iterator[dict[str, Any]]:
    """Give for each claim and task what was found at `length` tokens: "holds", "the opposite holds" or "undecided".

    A 95 % interval of the paired difference of accuracies that is above 0, below it, or neither.
    """
    held = {
        (row["way"], cell["task"]): np.array(cell["by_document"])
        for row in rows
        for cell in row["cells"]
        if cell["length"] == length
    }
    for task in dict.fromkeys(task for _, task in held):
        for claim, better, other in CLAIMS:
            if (better, task) not in held or (other, task) not in held:
                continue
            found = _change(held[other, task], held[better, task])
            said = "undecided"
            if found["low"] is not None:
                said = "holds" if found["low"] > 0 else "the opposite holds" if found["high"] < 0 else said
            yield {"task": task, "claim": claim, "way": better, "other": other, **found, "verdict": said}


def _accuracy(seeds: Sequence[Found]) -> np.ndarray:
    return _by_document(seeds, lambda found: found.ranks == 1)


def _by_document(seeds: Sequence[Found], score: Callable[[Found], np.ndarray]) -> np.ndarray:
    """Return the mean score of each document over its questions and over seeds, [N]."""
    scores = np.mean([score(found) for found in seeds], axis=0)  # [Q]
    return np.asarray(scores.reshape(len(seeds[0].task.documents), -1).mean(axis=1))


def _where(seeds: Sequence[Found], window: int, *, beyond: bool) -> float | None:
    """Return the accuracy on questions answered inside the first window, or beyond it; None: there are none."""
    chosen = [(question.place >= window) == beyond for question in seeds[0].task.questions]
    return float(np.mean([found.ranks[chosen] == 1 for found in seeds])) if any(chosen) else None


def _with_interval(scores: np.ndarray) -> dict[str, float | None]:
    """Return the mean and its interval; documents that all have one score say nothing of how others would differ."""
    low, high = (None, None)
    if np.ptp(scores) > 0:
        found = ratio_interval(scores, np.ones(len(scores)))
        low, high = (None, None) if found is None else (max(0.0, found[0]), min(1.0, found[1]))
    return {"mean": float(scores.mean()), "low": low, "high": high}


def _change(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    change = paired_change(before, after, np.ones(len(before)))
    return {"difference": change.difference, "low": change.low, "high": change.high, "p": change.p}
