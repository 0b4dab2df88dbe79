"""The findings as sentences, each derived from a number in results.json with its uncertainty.

The paired difference of each model from the baseline is found by length, document by document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posswap.comparison.report.conclusion import SIGNIFICANT, conclude, lower_or_higher, percent
from hf_posswap.comparison.report.results import (
    Change,
    DifferenceRow,
    FarContextRow,
    GainRow,
    KeptRow,
    LengthRow,
    ModelEntry,
    Needles,
    PositionRow,
    Results,
    RetrievalRow,
    Tasks,
    VectorRow,
)
from hf_posswap.utils.format import interval_text

_LONGEST_NAME = 48


def scores_by_length(model: ModelEntry) -> list[LengthRow]:
    """Return perplexity by length, of next tokens or of masked tokens; empty if it was not measured."""
    return model.get("ppl_prefix") or model.get("mlm_pos", {}).get("lengths", [])


def losses_by_position(model: ModelEntry) -> list[PositionRow]:
    """Return loss by position, of next tokens or of masked tokens; empty if it was not measured."""
    return model.get("nll_pos") or model.get("mlm_pos", {}).get("positions", [])


def number(value: float) -> str:
    """Format `value` with three significant digits.

    Example:
        >>> number(3.14159), number(24310.5)
        ('3.14', '24,300')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def times(length: int, window: int) -> str:
    """Express `length` as a multiple of the window.

    Example:
        >>> times(2048, 512), times(256, 512), times(512, 512), times(600, 0)
        ('4 times the window', 'within the window', 'the whole window', '')
    """
    if not window or length == window:
        return "the whole window" if window else ""
    return f"{number(length / window)} times the window" if length > window else "within the window"


def length_change(row: DifferenceRow, base: str) -> str:
    """Summarize a row of `comparisons`: the difference from the baseline, its interval, and whether it is significant.

    Example:
        >>> row = {"length": 512, "difference": -0.5, "low": -0.6, "high": -0.4, "p_holm": 0.004}
        >>> length_change(row, "base")
        'At 512 tokens: 39.3 % lower perplexity than base (95 % interval -45.1 % to -33.0 %), significant (p = 0.004).'
        >>> length_change(row | {"p_holm": 0.3}, "base").partition("), ")[2]
        'not significant (p = 0.3).'
    """
    p, interval = row["p_holm"], interval_text(row, percent)
    interval = interval if interval == "no interval" else f"95 % interval {interval}"
    change = f"At {row['length']:,} tokens: {lower_or_higher(row['difference'])} than {base} ({interval})"
    if p is None:
        return f"{change}, too few documents for a verdict."
    return f"{change}, {'significant' if p <= SIGNIFICANT else 'not significant'} (p = {p:.2g})."


TASKS_KEPT = "tasks kept"


def with_tasks_kept(results: Results) -> dict[str, Mapping[str, Any]]:
    """Return the models by name; those compared on tasks also hold the rows of the comparison, as `TASKS_KEPT`."""
    comparisons = results.get("comparisons", {})
    compared = {name: rows["ruler_lite"] for name, rows in comparisons.items() if rows.get("ruler_lite")}
    return {
        name: model | {TASKS_KEPT: compared[name]} if name in compared else model
        for name, model in results["models"].items()
    }


def task_scores(ruler: Tasks) -> dict[int, float]:
    """Return the mean score of all tasks of ruler_lite by length, shortest first.

    Example:
        >>> task_scores({"cells": [{"length": 8, "score": 0.5}, {"length": 4, "score": 1}, {"length": 8, "score": 0}]})
        {4: 1.0, 8: 0.25}
    """
    scores: dict[int, list[float]] = {}
    for cell in ruler["cells"]:
        scores.setdefault(cell["length"], []).append(cell["score"])
    return {length: sum(values) / len(values) for length, values in sorted(scores.items())}


def kept_text(row: KeptRow) -> str:
    """Return what a model keeps of the baseline's task score at one length, and the difference with its interval.

    Example:
        >>> row = {"kept": 90.0, "difference": -0.05, "low": -0.1, "high": 0.0}
        >>> kept_text(row), kept_text(row | {"kept": None, "low": None, "high": None})
        ('90% (-0.050, -0.100 to +0.000)', 'baseline 0% (-0.050, no interval)')
    """
    kept = "baseline 0%" if row["kept"] is None else f"{row['kept']:.0f}%"
    return f"{kept} ({row['difference']:+.3f}, {interval_text(row, '+.3f')})"


def far_change(far: FarContextRow | GainRow) -> Change:
    """Return the change of the loss by far context as a difference with its interval; negative if far context helps.

    Example:
        >>> far_change({"gain": 0.5, "low": 0.25, "high": 0.75})
        {'difference': -0.5, 'low': -0.75, 'high': -0.25}
    """
    low, high = far["low"], far["high"]
    return {
        "difference": 0.0 - far["gain"],
        "low": None if high is None else 0.0 - high,
        "high": None if low is None else 0.0 - low,
    }


def far_statement(model: ModelEntry) -> str | None:
    """Return a sentence on whether far context helps or harms a model; None if it was not measured.

    Example:
        >>> far = {"further": 1792, "tail": 128, "gain": -0.15, "low": -0.2, "high": -0.1, "verdict": "harms"}
        >>> far_statement({"far_context": far})
        'Far context harms: 1,792 tokens beyond the window change the loss by +0.150 nats per token (+0.100 to +0.200).'
    """
    far = model.get("far_context")
    if far is None:
        return None
    change = far_change(far)
    text = f"{far['further']:,} tokens beyond the window change the loss by {change['difference']:+.3f} nats per token"
    text = f"{text} ({interval_text(change, '+.3f')})"
    if far["verdict"] in ("helps", "harms"):
        return f"Far context {far['verdict']}: {text}."
    if far["verdict"] == "undecided":
        return f"Far context has no significant effect: {text}."
    return f"No verdict on far context: {text}; {far['reason']}"


def retrieved_said(rows: Sequence[RetrievalRow]) -> str:
    """Return a sentence on how well an encoder finds documents.

    Example:
        >>> retrieved_said([{"length": 512, "accuracy": 0.9, "low": 0.8, "high": 0.95, "chance": 0.02}])
        '90% of the documents of 512 tokens are found (80% to 95%; by chance 2%).'
    """
    last = rows[-1]
    interval = f"{last['low']:.0%} to {last['high']:.0%}; by chance {last['chance']:.0%}"
    return f"{last['accuracy']:.0%} of the documents of {last['length']:,} tokens are found ({interval})."


def near_said(rows: Sequence[VectorRow]) -> str:
    """Return a sentence on the similarity of an encoder's vectors to the base's, by length.

    Example:
        >>> rows = [{"length": 512, "cosine": 0.98, "low": 0.97, "high": 0.99}]
        >>> near_said([*rows, {"length": 1024, "cosine": 0.9, "low": 0.88, "high": 0.93}])
        "Cosine of its vectors to the base's: 0.980 (0.970 to 0.990) at 512 tokens, 0.900 (0.880 to 0.930) at 1,024."
    """
    values = [f"{row['cosine']:.3f} ({interval_text(row, '.3f')}) at {row['length']:,}" for row in rows]
    return f"Cosine of its vectors to the base's: {', '.join([f'{values[0]} tokens', *values[1:]])}."


def own_gaps(results: Results, model: ModelEntry) -> list[tuple[str, str]]:
    """Return the metrics that were not measured on `model` and why, without those of `common_gaps`."""
    common = common_gaps(results)
    return [gap for gap in model["not_measured"].items() if gap not in common]


def common_gaps(results: Results) -> list[tuple[str, str]]:
    """Return the metrics that were not measured on any model for the same reason, and that reason."""
    first, *others = results["models"].values()
    gaps = list(first["not_measured"].items())
    return [gap for gap in gaps if others and all(gap in model["not_measured"].items() for model in others)]


def effective(passkey: Needles, window: int) -> str:
    """Return a sentence on the length up to which a model finds passkeys.

    Example:
        >>> effective({"effective_length": {"length": 1024, "base": 1.0, "bar": 0.85, "no_verdict": None}}, 512)
        'Passkeys are found up to 1,024 tokens, 2 times the window.'
    """
    effective_length = passkey["effective_length"]
    if effective_length["length"] is None:
        return f"No effective length: {effective_length['no_verdict']}"
    return (
        f"Passkeys are found up to {effective_length['length']:,} tokens, {times(effective_length['length'], window)}."
    )


def share_found(passkey: Needles) -> float:
    """Return the share of passkeys found, over all lengths and depths.

    Example:
        >>> share_found({"cells": [{"share": 1.0}, {"share": 0.5}]})
        0.75
    """
    shares = [cell["share"] for cell in passkey["cells"]]
    return sum(shares) / len(shares)


@dataclass(frozen=True)
class Differences:
    """Differences from one baseline.

    Attributes:
        baseline: what all models are compared with, as text.
        rows: for each model its rows by length, each with "length", "difference", "low", "high" and "p_holm".
    """

    baseline: str
    rows: dict[str, list[DifferenceRow]]


def differences_of(results: Results) -> Differences | None:
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
    rows = {}
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


def finding(results: Results) -> str:
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
