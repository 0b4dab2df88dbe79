"""Comparison of each model with the base on the same tokens and needles."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hf_posswap.comparison.work import Work, document_losses
from hf_posswap.evaluation.paired import holm_corrected, mcnemar_p, paired_change


def against_base(base: Work, other: Work) -> dict[str, Any]:
    """Return the differences of `other` from `base` at all common lengths: losses with Holm's correction, and needles.

    Args:
        base: the measured baseline.
        other: the other model, measured on the same documents.
    """
    differences: dict[str, Any] = {}
    if base.raw.get("losses") and other.raw.get("losses"):
        differences["lengths"] = _losses(base, other)
    if "passkey" in base.raw and "passkey" in other.raw:
        differences["passkey"] = _needles(base.raw["passkey"], other.raw["passkey"])
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
