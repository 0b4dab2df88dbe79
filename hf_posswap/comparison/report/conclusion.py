"""The conclusion about each model of a comparison: one verdict and one sentence, the same in every output.

A difference is the model's loss minus that of the baseline, in nats per token: negative is better.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypedDict

from hf_posswap.comparison.report.results import Change, DifferenceRow, ModelEntry, Results, ShortContext
from hf_posswap.utils.format import interval_text

Verdict = Literal["worth it", "worth it beyond the window", "not yet", "no verdict", "baseline", "not swapped"]
SIGNIFICANT = 0.05
_CONTROL = "control"
_SAME_TOKENS = 0.1
"""Trainings whose numbers of tokens differ by a smaller share count as equally long."""
_LARGEST = 500.0
"""Larger differences, in nats per token, are converted to percent as this one, to avoid an overflow."""


class Compared(TypedDict, total=False):
    """The fields of a `Conclusion` that hold the measured difference."""

    against: str
    length: int
    difference: float
    low: float | None
    high: float | None
    p: float | None


@dataclass(frozen=True)
class Conclusion:
    """The verdict on one model.

    Attributes:
        verdict: whether the swap is worth it; "baseline" and "not swapped" are models without a swap.
        text: the verdict as one sentence.
        against: the baseline of the difference, or None without one.
        length: the length of the difference, in tokens.
        difference: loss minus that of the baseline, in nats per token; negative is better.
        low: lower end of its 95 % interval.
        high: upper end of the interval.
        p: its p-value, corrected over the lengths; None with too few documents.
        inside: the statement about the original window, see `inside_statement`, or None.
    """

    verdict: Verdict
    text: str
    against: str | None = None
    length: int | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    inside: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the conclusion as JSON data."""
        return asdict(self)


def conclude(results: Results, name: str) -> Conclusion | None:
    """Return the conclusion about one model, or None if no perplexity of next tokens was measured.

    A swap is worth it if the model reads texts beyond the window at a lower perplexity than an unswapped model that
    reads them by a sliding window, and, if its weights were trained, if that unswapped model is a control.

    Args:
        results: what results.json holds.
        name: the model's name.

    Example:
        >>> row = {"length": 1024, "difference": -0.036, "low": -0.045, "high": -0.028, "p_holm": 0.003}
        >>> rope = {"plan": {}, "cannot_run": {}, "ppl_prefix": [{"length": 1024}], "against_sliding": [row]}
        >>> loss = {"difference": -0.01, "lower": -0.03, "upper": 0.01, "margin": 0.02, "verdict": "not worse"}
        >>> rope["short_reg"] = {"loss": loss, "length": 128}
        >>> results = {"models": {"rope": rope}, "window": 128, "sliding": {"of": "control"}, "base": "control"}
        >>> results["comparisons"] = {}
        >>> conclude(results, "rope").text
        'Worth it: reads 8x the window at 3.5 % lower perplexity than the sliding window of control (-0.036 nats per token, 95 % interval -0.045 to -0.028).'
    """  # noqa: E501
    if not results["models"][name].get("ppl_prefix"):
        return None
    return replace(_conclude(results, name), inside=inside_statement(results, name))


def _conclude(results: Results, name: str) -> Conclusion:
    model, sliding = results["models"][name], results.get("sliding")
    rows = model.get("against_sliding") if sliding else None
    row = rows[-1] if rows else None
    compared: Compared = {}
    if row is not None and sliding:
        compared = {
            "against": f"the sliding window of {sliding['of']}",
            "p": row["p_holm"],
            "length": row["length"],
            "difference": row["difference"],
            "low": row["low"],
            "high": row["high"],
        }
    if model["plan"] is None:
        return _unswapped(results, name, row, compared)
    if row is None or not sliding:
        inside = model["ppl_prefix"][-1]["length"] <= results["window"]
        reason = "it was measured only inside the window" if inside else "it was not compared with a sliding window"
        return Conclusion("no verdict", f"No verdict: {reason}.")
    measured = f"{_multiple(row, results)} at {_than(row, compared['against'])}"
    if row["p_holm"] is None:
        reason = row.get("no_verdict") or "there are too few documents for a verdict."
        return Conclusion("no verdict", f"No verdict: {reason} Measured: {measured}.", **compared)
    untrained = "without training, " if "training" in model and model["training"] is None else ""
    if row["p_holm"] > SIGNIFICANT or row["difference"] >= 0:
        return Conclusion(
            "not yet", f"Not yet: {untrained}{_no_better(row, results, compared['against'])}.", **compared
        )
    if sliding["of"] in results["models"] and results["models"][sliding["of"]]["plan"] is not None:
        text = f"No verdict without an unswapped model: reads {measured}."
        return Conclusion("no verdict", text, **compared)
    if model.get("training") and not _controls(results):
        text = f"No verdict without a control: reads {measured}, but training alone may account for it."
        return Conclusion("no verdict", text, **compared)
    clause = _inside_clause(model.get("short_reg"), results["base"])
    verdict: Verdict = "worth it beyond the window" if clause else "worth it"
    return Conclusion(verdict, f"{verdict.capitalize()}: {untrained}reads {measured}{clause}.", **compared)


def _unswapped(results: Results, name: str, row: DifferenceRow | None, compared: Compared) -> Conclusion:
    is_baseline = (results.get("sliding") or {}).get("of") == name
    verdict: Verdict = "baseline" if is_baseline else "not swapped"
    head = "Baseline" if is_baseline else "Not swapped"
    if row is not None:
        whose = "its sliding window" if is_baseline else compared["against"]
        at_once = f"read at once, {_multiple(row, results)} has {_than(row, whose)}"
        return Conclusion(verdict, f"{head}: {at_once}{', not significant' if _is_open(row) else ''}.", **compared)
    if is_baseline:
        return Conclusion(verdict, f"{head}: a swap must beat its sliding window.")
    ends = results["models"][name]["cannot_run"]
    reason = "it reads nothing beyond the window" if ends else "it was measured only inside the window"
    return Conclusion(verdict, f"{head}: {reason}.")


def _multiple(row: DifferenceRow, results: Results) -> str:
    window = results["window"]
    return f"{row['length'] / window:.3g}x the window" if window else f"{row['length']:,} tokens"


def _than(row: Change, against: str) -> str:
    interval = interval_text(row, "+.3f")
    interval = interval if interval == "no interval" else f"95 % interval {interval}"
    return f"{lower_or_higher(row['difference'])} than {against} ({row['difference']:+.3f} nats per token, {interval})"


def _no_better(row: DifferenceRow, results: Results, against: str) -> str:
    if not _is_open(row):
        return f"reads {_multiple(row, results)} at {_than(row, against)}"
    interval = interval_text(row, "+.3f")
    return (
        f"reads {_multiple(row, results)} without a significant difference from {against} "
        f"({row['difference']:+.3f} nats per token, 95 % interval {interval}, perplexity {percent(row['difference'])})"
    )


def _is_open(row: DifferenceRow) -> bool:
    return row["p_holm"] is None or row["p_holm"] > SIGNIFICANT


def _inside_clause(short: ShortContext | None, base: str) -> str:
    """Return what limits the verdict inside the window; "" if the loss there was measured to be not worse."""
    loss = short["loss"] if short else None
    if loss is None:
        return "; inside the window it was not compared"
    if loss["verdict"] == "not worse":
        return ""
    if loss["verdict"] == "no verdict":
        return f"; inside the window there is no verdict: {(loss['reason'] or '').rstrip('.')}"
    inside = f"; inside the window {lower_or_higher(loss['difference'])} than {base}"
    if loss["verdict"] == "worse":
        return f"{inside}, more than the allowed {percent(loss['margin'])}"
    return f"{inside}, and whether within the allowed {percent(loss['margin'])} is undecided"


def inside_statement(results: Results, name: str) -> str | None:
    """Return the difference inside the window and whether it stays within the margin; None if it was not measured.

    Example:
        >>> loss = {"difference": 0.018, "lower": 0.007, "upper": 0.029, "margin": 0.02, "verdict": "undecided"}
        >>> models = {"yarn": {"short_reg": {"loss": loss | {"reason": None}, "length": 128}}}
        >>> inside_statement({"models": models, "base": "control", "comparisons": {}}, "yarn")
        'Inside the window: 1.8 % higher perplexity than control (+0.018 nats per token, 95 % interval +0.007 to +0.029), significant; within the allowed +2.0 %: undecided.'
    """  # noqa: E501
    short = results["models"][name].get("short_reg")
    if not short:
        return None
    loss, base = short["loss"], results["base"]
    row: Change = {"difference": loss["difference"], "low": loss["lower"], "high": loss["upper"]}
    measured = f"Inside the window: {_than(row, base)}"
    if loss["verdict"] == "no verdict":
        return f"{measured}; no verdict: {loss['reason']}"
    rows = results["comparisons"].get(name, {}).get("lengths", [])
    p = next((row["p_holm"] for row in rows if row["length"] == short["length"]), None)
    excludes_zero = (loss["lower"] or 0.0) > 0 or (loss["upper"] or 0.0) < 0
    significant = excludes_zero if p is None else p <= SIGNIFICANT
    answer = {"not worse": "yes", "worse": "no"}.get(loss["verdict"], loss["verdict"])
    certainty = "significant" if significant else "not significant"
    return f"{measured}, {certainty}; within the allowed {percent(loss['margin'])}: {answer}."


def control_warnings(results: Results) -> list[str]:
    """Return a warning for trained models that are compared without a control, or with one of another training length.

    Example:
        >>> rope = {"plan": {}, "training": {"recipe": "learned-to-rope", "tokens": 4096}}
        >>> control_warnings({"models": {"base": {"plan": None, "training": None}, "rope": rope}})
        ['rope was trained, and no control was compared: the differences contain the effect of the training itself. Train the recipe control on as many tokens (4,096) of the same text, and compare it too.']
    """  # noqa: E501
    models = results["models"]
    trained = {
        n: training["tokens"] for n, m in models.items() if m["plan"] is not None and (training := m.get("training"))
    }
    controls = _controls(results)
    if not trained:
        return []
    if not controls:
        names = ", ".join(trained)
        was, counts = "was" if len(trained) == 1 else "were", ", ".join(f"{n:,}" for n in sorted(set(trained.values())))
        return [
            f"{names} {was} trained, and no control was compared: the differences contain the effect of the training "
            f"itself. Train the recipe control on as many tokens ({counts}) of the same text, and compare it too."
        ]
    warnings = []
    for name, tokens in trained.items():
        known = {control: count for control, count in controls.items() if count is not None}
        if known and all(abs(count - tokens) > _SAME_TOKENS * tokens for count in known.values()):
            listed = ", ".join(f"{control} on {count:,}" for control, count in known.items())
            warnings.append(
                f"{name} was trained on {tokens:,} tokens, {listed}: the difference contains the effect of unequal "
                "training. Train the control on as many tokens."
            )
    return warnings


def is_control_entry(name: str, model: ModelEntry) -> bool:
    """Return whether an entry of results.json is a control: unswapped, called "control" or trained by that recipe.

    Example:
        >>> is_control_entry("small/control", {"plan": None}), is_control_entry("control", {"plan": {}})
        (True, False)
    """
    training = model.get("training")
    return model["plan"] is None and _CONTROL in (name.rpartition("/")[2], training and training.get("recipe"))


def _controls(results: Results) -> dict[str, int | None]:
    """Return the number of training tokens of each control; None if it is not known."""
    models = results["models"]
    trainings = {n: m.get("training") for n, m in models.items() if is_control_entry(n, m)}
    return {n: training.get("tokens") if training else None for n, training in trainings.items()}


def percent(nats: float) -> str:
    """Convert a change of the mean loss to a relative change of perplexity.

    Example:
        >>> percent(-0.036), percent(0.02), percent(3.0)
        ('-3.5 %', '+2.0 %', '+1,909 %')
    """
    change = 100 * math.expm1(min(nats, _LARGEST))
    if change >= 1e6:
        return f"{change:+.0e} %"
    return f"{change:+,.0f} %" if abs(change) >= 100 else f"{change:+.1f} %"


def lower_or_higher(nats: float) -> str:
    """Return a difference of losses as a relative change of perplexity in words.

    Example:
        >>> lower_or_higher(-0.036), lower_or_higher(0.036)
        ('3.5 % lower perplexity', '3.7 % higher perplexity')
    """
    return f"{percent(nats)[1:]} {'lower' if nats < 0 else 'higher'} perplexity"
