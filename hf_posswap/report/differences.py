"""The paired difference of each model from the baseline by length, document by document, and the finding in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_posswap.report.conclusion import conclude, lower_or_higher

_LONGEST_NAME = 48


@dataclass(frozen=True)
class Differences:
    """Differences from one baseline.

    Attributes:
        baseline: what all models are compared with, as text.
        rows: for each model its rows by length, each with "length", "difference", "low", "high" and "p_holm".
    """

    baseline: str
    rows: dict[str, list[dict[str, Any]]]


def differences_of(results: Mapping[str, Any]) -> Differences | None:
    """Return the differences from the sliding window, or without one from the baseline model; None: there are none.

    Up to the window a sliding window reads what its model reads, so there it is the difference from that model.

    Example:
        >>> inside = {"length": 128, "difference": -0.01, "low": -0.02, "high": 0.0, "p_holm": 0.1}
        >>> beyond = {"length": 256, "difference": -0.03, "low": -0.04, "high": -0.02, "p_holm": 0.01}
        >>> results = {"models": {"rope": {"against_sliding": [beyond]}}, "sliding": {"of": "control"}, "window": 128}
        >>> found = differences_of(results | {"base": "control", "comparisons": {"rope": {"lengths": [inside]}}})
        >>> found.baseline, [row["length"] for row in found.rows["rope"]]
        ('the sliding window of control', [128, 256])
    """
    sliding, base = results.get("sliding"), results["base"]
    owner = sliding["of"] if sliding else base
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, model in results["models"].items():
        compared = results["comparisons"].get(name, {}).get("lengths", [])
        if sliding:
            inside = [row for row in compared if row["length"] <= results["window"]] if owner == base else []
            compared = [*inside, *(model.get("against_sliding") or [])]
        if compared:
            rows[name] = compared
    if not rows:
        return None
    return Differences(f"the sliding window of {owner}" if sliding else base, rows)


def finding(results: Mapping[str, Any]) -> str:
    """Return the finding in the differences as a title: the best swap that is worth it, or that none is.

    Example:
        >>> row = {"length": 1024, "difference": -0.036, "low": -0.045, "high": -0.028, "p_holm": 0.003}
        >>> rope = {"plan": {}, "cannot_run": {}, "ppl_prefix": [{"length": 1024}], "against_sliding": [row]}
        >>> results = {"models": {"rope": rope}, "window": 128, "sliding": {"of": "control"}, "base": "control"}
        >>> finding(results)
        'rope reads 8x the window at 3.5 % lower perplexity than a sliding window'
    """
    conclusions = {name: conclude(results, name) for name in results["models"]}
    worth = {n: c for n, c in conclusions.items() if c is not None and c.verdict.startswith("worth it")}
    if worth:
        best = min(worth, key=lambda name: worth[name].difference or 0.0)
        conclusion = worth[best]
        window = results["window"]
        length = f"{(conclusion.length or 0) / window:.3g}x the window" if window else f"{conclusion.length:,} tokens"
        change = lower_or_higher(conclusion.difference or 0.0)
        return f"{_short(best)} reads {length} at {change} than a sliding window"
    verdicts = {conclusion.verdict for conclusion in conclusions.values() if conclusion is not None}
    if "not yet" in verdicts and "no verdict" not in verdicts:
        return "No swap reads beyond the window better than a sliding window"
    if (differences := differences_of(results)) is None:
        return "Difference by length"
    return f"Difference from {_short(differences.baseline)} by length"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
