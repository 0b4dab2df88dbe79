"""Scores of a reading method by document, with intervals, and paired differences from another method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posswap.evaluation import paired_change, ratio_interval
from recipes.studies.long_texts import NEAREST, Task, gains

CUT, MEAN = "cut at the window", "mean of windows"
INTERPOLATED, ROPE, NTK = "table, interpolated", "rope, distilled", "rope, distilled, by ntk"
CLAIMS = (
    ("reading on beats cutting the text", INTERPOLATED, CUT),
    ("RoPE beats an extended table", NTK, INTERPOLATED),
    ("RoPE needs its scaling", NTK, ROPE),
)
"""LongEmbed's claims, each with the better and the other method; its RoPE models were pretrained with RoPE."""


@dataclass(frozen=True)
class TaskResult:
    """The result of one method and seed on one task.

    Attributes:
        task: the task.
        ranks: of the right documents, one per question, [Q].
        vectors: unit vectors of the documents, [N, E]; None: each document has several.
    """

    task: Task
    ranks: np.ndarray
    vectors: np.ndarray | None


def cells_of(
    seeds: Sequence[Sequence[TaskResult]], cut: Sequence[TaskResult], mean: Sequence[TaskResult], window: int
) -> list[dict[str, Any]]:
    """Return the scores of one method, a cell per task and length.

    A document's score is the mean over its questions and over seeds; the unit of every interval is the document.

    Args:
        seeds: of the method, by seed, with the tasks in one order.
        cut: of the base that reads only the first window, with the tasks in the same order.
        mean: of the base with the mean of the vectors of all windows, likewise.
        window: of the base, in tokens.
    """
    return [
        {
            "task": first_seed.task.name,
            "length": first_seed.task.length,
            "documents": len(first_seed.task.documents),
            "questions": len(first_seed.task.questions),
            "accuracy": _with_interval(_accuracy(of_seeds)),
            "by_document": _accuracy(of_seeds).tolist(),
            "recall": _with_interval(_by_document(of_seeds, lambda result: result.ranks <= NEAREST)),
            "ndcg": _with_interval(_by_document(of_seeds, lambda result: gains(result.ranks))),
            "inside": _where(of_seeds, window, beyond=False),
            "beyond": _where(of_seeds, window, beyond=True),
            "by_part": _by_part(of_seeds),
            "less_cut": _change(_accuracy([one_cut]), _accuracy(of_seeds)),
            "less_mean": _change(_accuracy([one_mean]), _accuracy(of_seeds)),
            "by_seed": [float((result.ranks == 1).mean()) for result in of_seeds],
        }
        for of_seeds, one_cut, one_mean in zip(zip(*seeds, strict=True), cut, mean, strict=True)
        for first_seed in of_seeds[:1]
    ]


def near_the_base(seeds: Sequence[Sequence[TaskResult]], cut: Sequence[TaskResult], window: int) -> float | None:
    """Return the mean cosine of one-window documents' vectors to the base's; None: documents have several vectors."""
    cosines = [
        (result.vectors * base_result.vectors).sum(axis=1)
        for of_seed in seeds
        for result, base_result in zip(of_seed, cut, strict=True)
        if result.task.length == window and result.vectors is not None and base_result.vectors is not None
    ]
    return float(np.concatenate(cosines).mean()) if cosines else None


def verdicts(rows: Sequence[dict[str, Any]], length: int) -> Iterator[dict[str, Any]]:
    """Yield for each claim and task the verdict at `length` tokens: "holds", "the opposite holds" or "undecided".

    A 95 % interval of the paired difference of accuracies that is above 0, below it, or neither.
    """
    scores_by_document = {
        (row["way"], cell["task"]): np.array(cell["by_document"])
        for row in rows
        for cell in row["cells"]
        if cell["length"] == length
    }
    for task in dict.fromkeys(task for _, task in scores_by_document):
        for claim, better, other in CLAIMS:
            if (better, task) not in scores_by_document or (other, task) not in scores_by_document:
                continue
            change = _change(scores_by_document[other, task], scores_by_document[better, task])
            verdict = "undecided"
            if change["low"] is not None:
                verdict = "holds" if change["low"] > 0 else "the opposite holds" if change["high"] < 0 else verdict
            yield {"task": task, "claim": claim, "way": better, "other": other, **change, "verdict": verdict}


def _accuracy(seeds: Sequence[TaskResult]) -> np.ndarray:
    return _by_document(seeds, lambda result: result.ranks == 1)


def _by_document(seeds: Sequence[TaskResult], score: Callable[[TaskResult], np.ndarray]) -> np.ndarray:
    """Return the mean score of each document over its questions and over seeds, [N]."""
    scores = np.mean([score(result) for result in seeds], axis=0)  # [Q]
    return np.asarray(scores.reshape(len(seeds[0].task.documents), -1).mean(axis=1))


def _by_part(seeds: Sequence[TaskResult]) -> list[float]:
    """Return the accuracy on the questions of each equal part of the documents, first part first."""
    right = np.mean([result.ranks == 1 for result in seeds], axis=0)  # [Q]
    return [float(share) for share in right.reshape(len(seeds[0].task.documents), -1).mean(axis=0)]


def _where(seeds: Sequence[TaskResult], window: int, *, beyond: bool) -> float | None:
    """Return the accuracy on questions answered inside the first window, or beyond it; None: there are none."""
    chosen = [(question.place >= window) == beyond for question in seeds[0].task.questions]
    return float(np.mean([result.ranks[chosen] == 1 for result in seeds])) if any(chosen) else None


def _with_interval(scores: np.ndarray) -> dict[str, float | None]:
    """Return the mean and its interval; without an interval if all documents have the same score."""
    low, high = (None, None)
    if np.ptp(scores) > 0:
        interval = ratio_interval(scores, np.ones(len(scores)))
        low, high = (None, None) if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))
    return {"mean": float(scores.mean()), "low": low, "high": high}


def _change(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    change = paired_change(before, after, np.ones(len(before)))
    return {"difference": change.difference, "low": change.low, "high": change.high, "p": change.p}
