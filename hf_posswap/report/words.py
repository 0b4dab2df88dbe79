"""The findings in plain words: every sentence follows from a number of results.json, with its uncertainty."""

from __future__ import annotations

import math
from typing import Any

from hf_posswap.utils.format import interval_text

SIGNIFICANT = 0.05


def scores_by_length(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Return perplexity by length, of the next token or of masked ones; empty where it was not measured."""
    return model.get("ppl_prefix") or model.get("mlm_pos", {}).get("lengths", [])


def number(value: float) -> str:
    """Return `value` to three digits.

    Example:
        >>> number(3.14159), number(24310.5)
        ('3.14', '24,300')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def times(length: int, window: int) -> str:
    """Return what `length` is of the window.

    Example:
        >>> times(2048, 512), times(256, 512), times(512, 512), times(600, 0)
        ('4 times the window', 'within the window', 'the whole window', '')
    """
    if not window or length == window:
        return "the whole window" if window else ""
    return f"{number(length / window)} times the window" if length > window else "within the window"


def length_change(row: dict[str, Any], base: str) -> str:
    """Return what a row of `comparisons` says: better, worse, or not told apart from chance.

    Example:
        >>> row = {"length": 512, "difference": -0.5, "low": -0.6, "high": -0.4, "p_holm": 0.004}
        >>> length_change(row, "base")
        'Better than base at 512 tokens: perplexity 39.3 % lower (95 % interval -45.1 % to -33.0 %, p = 0.004).'
        >>> length_change(row | {"p_holm": 0.3}, "base")
        'At 512 tokens no difference from base that could not be chance (perplexity -39.3 %, p = 0.3).'
    """
    at, p = f"{row['length']:,} tokens", row["p_holm"]
    change = _percent(row["difference"])
    if p is None:
        return f"At {at} perplexity {change} against {base}: too few documents for a verdict."
    if p > SIGNIFICANT:
        return f"At {at} no difference from {base} that could not be chance (perplexity {change}, p = {p:.2g})."
    word, way = ("Better", "lower") if row["difference"] < 0 else ("Worse", "higher")
    sure = f"95 % interval {interval_text(row, _percent)}, p = {p:.2g}"
    return f"{word} than {base} at {at}: perplexity {change[1:]} {way} ({sure})."


def far_said(model: dict[str, Any]) -> str | None:
    """Return whether far context helps or harms a model, as a sentence; None: it was not measured.

    Example:
        >>> far = {"further": 1792, "tail": 128, "gain": -0.15, "low": -0.2, "high": -0.1, "verdict": "harms"}
        >>> far_said({"far_context": far})
        'Far context harms: 1,792 tokens beyond the window raise the loss by 0.150 nats a token (0.100 to 0.200).'
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
    what = f"{far['further']:,} tokens beyond the window"
    if far["verdict"] == "helps":
        return f"Far context helps: {what} lower the loss by {gain:.3f} nats a token ({interval_text(far, '.3f')})."
    if far["verdict"] == "harms":
        return f"Far context harms: {what} raise the loss by {-gain:.3f} nats a token ({interval_text(raised, '.3f')})."
    change = f"{what} change the loss by {-gain:+.3f} nats a token ({interval_text(raised, '+.3f')})"
    if far["verdict"] == "undecided":
        return f"Far context neither helps nor harms for sure: {change}."
    return f"No verdict on far context: {change}; {far['reason']}"


def sliding_said(model: dict[str, Any], sliding: dict[str, Any] | None) -> str | None:
    """Return whether a model is below or above the sliding window, at its longest length; None: it was not measured.

    Example:
        >>> row = {"length": 1024, "difference": -0.02, "low": -0.03, "high": -0.01, "p_holm": 0.004}
        >>> sliding_said({"against_sliding": [row]}, {"of": "control", "window": 128})
        'Below the sliding window of control at 1,024 tokens: 0.020 nats a token less (-0.030 to -0.010, p = 0.004).'
    """
    rows = model.get("against_sliding")
    if not rows or not sliding:
        return None
    row, p = rows[-1], rows[-1]["p_holm"]
    where = f"the sliding window of {sliding['of']} at {row['length']:,} tokens"
    nats, sure = f"{abs(row['difference']):.3f} nats a token", interval_text(row, "+.3f")
    if p is None:
        return f"Against {where}: {row['difference']:+.3f} nats a token ({sure}), too few documents for a verdict."
    if p > SIGNIFICANT:
        return f"Neither below nor above {where} for sure: {row['difference']:+.3f} nats a token ({sure}, p = {p:.2g})."
    if row["difference"] < 0:
        return f"Below {where}: {nats} less ({sure}, p = {p:.2g})."
    return f"Above {where}: {nats} more ({sure}, p = {p:.2g}); windows of {sliding['window']:,} tokens predict better."


def retrieved_said(rows: list[dict[str, Any]]) -> str:
    """Return how well an encoder finds documents, as a sentence.

    Example:
        >>> retrieved_said([{"length": 512, "accuracy": 0.9, "low": 0.8, "high": 0.95, "chance": 0.02}])
        'Of documents of 512 tokens 90% are found (80% to 95%; by chance 2%).'
    """
    last = rows[-1]
    sure = f"{last['low']:.0%} to {last['high']:.0%}; by chance {last['chance']:.0%}"
    return f"Of documents of {last['length']:,} tokens {last['accuracy']:.0%} are found ({sure})."


def near_said(rows: list[dict[str, Any]]) -> str:
    """Return how near an encoder's vectors are to the base's, by length, as a sentence.

    Example:
        >>> rows = [{"length": 512, "cosine": 0.98, "low": 0.97, "high": 0.99}]
        >>> near_said([*rows, {"length": 1024, "cosine": 0.9, "low": 0.88, "high": 0.93}])
        "Cosine of its vectors to the base's: 0.980 (0.970 to 0.990) at 512 tokens, 0.900 (0.880 to 0.930) at 1,024."
    """
    said = [f"{row['cosine']:.3f} ({interval_text(row, '.3f')}) at {row['length']:,}" for row in rows]
    return f"Cosine of its vectors to the base's: {', '.join([f'{said[0]} tokens', *said[1:]])}."


def own_gaps(results: dict[str, Any], model: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the metrics that were not measured on `model` and why, but for what is said of all models alike."""
    common = common_gaps(results)
    return [gap for gap in model["not_measured"].items() if gap not in common]


def common_gaps(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the metrics that were measured on no model, and why, where the reason is the same."""
    first, *others = results["models"].values()
    gaps = list(first["not_measured"].items())
    return [gap for gap in gaps if others and all(gap in model["not_measured"].items() for model in others)]


def _percent(nats: float) -> str:
    """Return a change of the mean loss as the change of perplexity that it is."""
    percent = 100 * math.expm1(nats)
    return f"{percent:+,.0f} %" if abs(percent) >= 100 else f"{percent:+.1f} %"


def short_verdict(short: dict[str, Any]) -> str:
    """Return the short-context verdict as a sentence.

    Example:
        >>> loss = {"verdict": "worse", "difference": 0.2, "lower": 0.1, "upper": 0.3, "margin": 0.02, "reason": None}
        >>> short_verdict({"loss": loss, "length": 512, "agreement": 0.9, "divergence": 0.1})
        'It costs something within the window: 0.200 nats a token more at 512 tokens, where 0.02 are allowed.'
    """
    loss, at = short["loss"], f"at {short['length']:,} tokens"
    change, margin = loss["difference"], loss["margin"]
    if loss["verdict"] == "no verdict":
        return f"No verdict on what it costs within the window: {loss['reason']}"
    if loss["verdict"] == "not worse":
        return f"It costs nothing that matters within the window: {change:+.3f} nats a token {at}, {margin:g} allowed."
    if loss["verdict"] == "worse":
        return (
            f"It costs something within the window: {change:.3f} nats a token more {at}, where {margin:g} are allowed."
        )
    return (
        f"Undecided whether it costs something within the window: {change:+.3f} nats a token {at}, "
        f"between {loss['lower']:+.3f} and {loss['upper']:+.3f}, {margin:g} allowed."
    )


def effective(passkey: dict[str, Any], window: int) -> str:
    """Return how far a model finds passkeys, as a sentence.

    Example:
        >>> effective({"effective_length": {"length": 1024, "base": 1.0, "bar": 0.85, "no_verdict": None}}, 512)
        'Passkeys are found up to 1,024 tokens, 2 times the window.'
    """
    found = passkey["effective_length"]
    if found["length"] is None:
        return f"No effective length: {found['no_verdict']}"
    return f"Passkeys are found up to {found['length']:,} tokens, {times(found['length'], window)}."


def share_found(passkey: dict[str, Any]) -> float:
    """Return the share of passkeys found, over all lengths and depths.

    Example:
        >>> share_found({"cells": [{"share": 1.0}, {"share": 0.5}]})
        0.75
    """
    shares = [cell["share"] for cell in passkey["cells"]]
    return sum(shares) / len(shares)
