"""The findings as sentences, each derived from a number in results.json with its uncertainty."""

from __future__ import annotations

import math
from typing import Any

from hf_posswap.utils.format import interval_text

SIGNIFICANT = 0.05


def scores_by_length(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Return perplexity by length, of next tokens or of masked tokens; empty if it was not measured."""
    return model.get("ppl_prefix") or model.get("mlm_pos", {}).get("lengths", [])


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


def length_change(row: dict[str, Any], base: str) -> str:
    """Summarize a row of `comparisons` as better, worse, or not significant.

    Example:
        >>> row = {"length": 512, "difference": -0.5, "low": -0.6, "high": -0.4, "p_holm": 0.004}
        >>> length_change(row, "base")
        'Better than base at 512 tokens: perplexity 39.3 % lower (95 % interval -45.1 % to -33.0 %, p = 0.004).'
        >>> length_change(row | {"p_holm": 0.3}, "base")
        'At 512 tokens no significant difference from base (perplexity -39.3 %, p = 0.3).'
    """
    length_text, p = f"{row['length']:,} tokens", row["p_holm"]
    change = _percent(row["difference"])
    if p is None:
        return f"At {length_text} perplexity {change} compared with {base}: too few documents for a verdict."
    if p > SIGNIFICANT:
        return f"At {length_text} no significant difference from {base} (perplexity {change}, p = {p:.2g})."
    verdict, direction = ("Better", "lower") if row["difference"] < 0 else ("Worse", "higher")
    interval = f"95 % interval {interval_text(row, _percent)}, p = {p:.2g}"
    return f"{verdict} than {base} at {length_text}: perplexity {change[1:]} {direction} ({interval})."


def far_said(model: dict[str, Any]) -> str | None:
    """Return a sentence on whether far context helps or harms a model; None if it was not measured.

    Example:
        >>> far = {"further": 1792, "tail": 128, "gain": -0.15, "low": -0.2, "high": -0.1, "verdict": "harms"}
        >>> far_said({"far_context": far})
        'Far context harms: 1,792 tokens beyond the window raise the loss by 0.150 nats per token (0.100 to 0.200).'
        >>> far_said({"far_context": None})
        'It reads nothing beyond the window.'
    """
    if "far_context" not in model:
        return None
    far = model["far_context"]
    if far is None:
        return "It reads nothing beyond the window."
    gain = far["gain"]
    raised = {"low": far["high"] and -far["high"], "high": far["low"] and -far["low"]}
    further = f"{far['further']:,} tokens beyond the window"
    if far["verdict"] == "helps":
        nats = f"{gain:.3f} nats per token"
        return f"Far context helps: {further} lower the loss by {nats} ({interval_text(far, '.3f')})."
    if far["verdict"] == "harms":
        nats = f"{-gain:.3f} nats per token"
        return f"Far context harms: {further} raise the loss by {nats} ({interval_text(raised, '.3f')})."
    change = f"{further} change the loss by {-gain:+.3f} nats per token ({interval_text(raised, '+.3f')})"
    if far["verdict"] == "undecided":
        return f"Far context has no significant effect: {change}."
    return f"No verdict on far context: {change}; {far['reason']}"


def sliding_said(model: dict[str, Any], sliding: dict[str, Any] | None) -> str | None:
    """Return a sentence that compares a model with the sliding window at its longest length; None if not measured.

    Example:
        >>> row = {"length": 1024, "difference": -0.02, "low": -0.03, "high": -0.01, "p_holm": 0.004}
        >>> sliding_said({"against_sliding": [row]}, {"of": "control", "window": 128})
        'Better than the sliding window of control at 1,024 tokens by 0.020 nats (-0.030 to -0.010, p = 0.004).'
    """
    rows = model.get("against_sliding")
    if not rows or not sliding:
        return None
    row, p = rows[-1], rows[-1]["p_holm"]
    window = f"the sliding window of {sliding['of']} at {row['length']:,} tokens"
    nats, interval = f"{abs(row['difference']):.3f} nats", interval_text(row, "+.3f")
    if p is None:
        return f"Compared with {window}: {row['difference']:+.3f} nats ({interval}), too few documents for a verdict."
    if p > SIGNIFICANT:
        return f"No significant difference from {window}: {row['difference']:+.3f} nats ({interval}, p = {p:.2g})."
    if row["difference"] < 0:
        return f"Better than {window} by {nats} ({interval}, p = {p:.2g})."
    return f"Worse than {window} by {nats} ({interval}, p = {p:.2g})."


def retrieved_said(rows: list[dict[str, Any]]) -> str:
    """Return a sentence on how well an encoder finds documents.

    Example:
        >>> retrieved_said([{"length": 512, "accuracy": 0.9, "low": 0.8, "high": 0.95, "chance": 0.02}])
        '90% of the documents of 512 tokens are found (80% to 95%; by chance 2%).'
    """
    last = rows[-1]
    interval = f"{last['low']:.0%} to {last['high']:.0%}; by chance {last['chance']:.0%}"
    return f"{last['accuracy']:.0%} of the documents of {last['length']:,} tokens are found ({interval})."


def near_said(rows: list[dict[str, Any]]) -> str:
    """Return a sentence on the similarity of an encoder's vectors to the base's, by length.

    Example:
        >>> rows = [{"length": 512, "cosine": 0.98, "low": 0.97, "high": 0.99}]
        >>> near_said([*rows, {"length": 1024, "cosine": 0.9, "low": 0.88, "high": 0.93}])
        "Cosine of its vectors to the base's: 0.980 (0.970 to 0.990) at 512 tokens, 0.900 (0.880 to 0.930) at 1,024."
    """
    values = [f"{row['cosine']:.3f} ({interval_text(row, '.3f')}) at {row['length']:,}" for row in rows]
    return f"Cosine of its vectors to the base's: {', '.join([f'{values[0]} tokens', *values[1:]])}."


def own_gaps(results: dict[str, Any], model: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the metrics that were not measured on `model` and why, without those of `common_gaps`."""
    common = common_gaps(results)
    return [gap for gap in model["not_measured"].items() if gap not in common]


def common_gaps(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the metrics that were not measured on any model for the same reason, and that reason."""
    first, *others = results["models"].values()
    gaps = list(first["not_measured"].items())
    return [gap for gap in gaps if others and all(gap in model["not_measured"].items() for model in others)]


def _percent(nats: float) -> str:
    """Convert a change of the mean loss to a relative change of perplexity."""
    percent = 100 * math.expm1(nats)
    return f"{percent:+,.0f} %" if abs(percent) >= 100 else f"{percent:+.1f} %"


def short_verdict(short: dict[str, Any]) -> str:
    """Return the short-context verdict as a sentence.

    Example:
        >>> loss = {"verdict": "worse", "difference": 0.2, "lower": 0.1, "upper": 0.3, "margin": 0.02, "reason": None}
        >>> short_verdict({"loss": loss, "length": 512, "agreement": 0.9, "divergence": 0.1})
        'Worse within the window: +0.200 nats per token at 512 tokens, margin 0.02.'
    """
    loss, at = short["loss"], f"at {short['length']:,} tokens"
    change, margin = loss["difference"], loss["margin"]
    if loss["verdict"] == "no verdict":
        return f"No verdict within the window: {loss['reason']}"
    if loss["verdict"] == "not worse":
        return f"Not worse within the window: {change:+.3f} nats per token {at}, margin {margin:g}."
    if loss["verdict"] == "worse":
        return f"Worse within the window: {change:+.3f} nats per token {at}, margin {margin:g}."
    return (
        f"Undecided within the window: {change:+.3f} nats per token {at} "
        f"({loss['lower']:+.3f} to {loss['upper']:+.3f}), margin {margin:g}."
    )


def effective(passkey: dict[str, Any], window: int) -> str:
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


def share_found(passkey: dict[str, Any]) -> float:
    """Return the share of passkeys found, over all lengths and depths.

    Example:
        >>> share_found({"cells": [{"share": 1.0}, {"share": 0.5}]})
        0.75
    """
    shares = [cell["share"] for cell in passkey["cells"]]
    return sum(shares) / len(shares)
