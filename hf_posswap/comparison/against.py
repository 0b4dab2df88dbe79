"""Comparison of each model with the base on the same tokens and needles."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hf_posswap.comparison.work import Work, document_losses
from hf_posswap.evaluation.paired import holm_corrected, mcnemar_p, paired_change


def against_base(base: Work, other: Work) -> dict[str, Any]:
    """Return the differences of `other` from `base` at all common lengths: losses, needles and tasks.

    The p-values of the losses have Holm's correction.

    Args:
        base: the measured baseline.
        other: the other model, measured on the same documents.
    """
    differences: dict[str, Any] = {}
    if base.raw.get("losses") and other.raw.get("losses"):
        differences["lengths"] = _losses(base, other)
    if "passkey" in base.raw and "passkey" in other.raw:
        differences["passkey"] = _needles(base.raw["passkey"], other.raw["passkey"])
    if "ruler_lite" in base.raw and "ruler_lite" in other.raw:
        differences["ruler_lite"] = _tasks(base.raw["ruler_lite"], other.raw["ruler_lite"], base.settings.seed)
    return differences


def _losses(base: Work, other: Work) -> list[dict[str, Any]]:
    rows = []
    for length in sorted(set(base.lengths) & set(other.lengths)):
        before, after = (document_losses(work, length).sum(axis=1, dtype=np.float64) for work in (base, other))
        change = paired_change(before, after, np.full(len(before), length - 1), seed=base.settings.seed)
        rows.append({"length": length} | dataclasses.asdict(change))
    return holm_corrected(rows)


def _needles(before: dict[Any, bool], after: dict[Any, bool]) -> dict[str, Any] | None:
    """Return the exact McNemar test over the needles that both models were tested on; None without any."""
    both = sorted(set(before) & set(after))
    if not both:
        return None
    old, new = [before[key] for key in both], [after[key] for key in both]
    return {"needles": len(both), "before": sum(old), "after": sum(new), "p": mcnemar_p(old, new)}


def _tasks(before: dict[Any, float], after: dict[Any, float], seed: int) -> list[dict[str, Any]]:
    """Return, for each common length, both mean scores over the same prompts, their difference, and what is kept.

    `kept` is the percentage of the base's score (also called retention), None where the base answers nothing. The
    interval is that of the difference, over prompts.
    """
    rows = []
    for length in sorted({key[0] for key in before} & {key[0] for key in after}):
        prompts = sorted(key for key in before if key[0] == length and key in after)
        old, new = (np.array([scores[key] for key in prompts]) for scores in (before, after))
        change = paired_change(old, new, np.ones(len(prompts)), seed=seed)
        ends = {"difference": change.difference, "low": change.low, "high": change.high, "p": change.p}
        kept = float(100 * new.mean() / old.mean()) if old.any() else None
        scores = {"score": float(new.mean()), "base_score": float(old.mean()), "kept": kept}
        rows.append({"length": length, "prompts": len(prompts)} | scores | ends)
    return rows
