"""The goals of the adaptation study: their limits for each scheme, the verdicts, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.utils.format import interval_text
from recipes.studies.measuring import (
    LAST,
    LAST_ALONE,
    MARGIN,
    MULTIPLES,
    WINDOW,
    Means,
    difference,
    intervals_said,
    is_below,
    mean_with_interval,
)

_ABOVE_BASE = {"rope": 0.005, "sinusoidal": 0.005}
_ABOVE_BASE_OTHERS = 0.01
"""Nats a token in the window by which a scheme may exceed the untouched base."""
_FAR = {"rope": -0.02, "alibi": -0.02, "yarn": -0.02, "sinusoidal": 0.02}
"""Highest change of the last window's loss by far text, in nats a token; 0 for other schemes."""
_WITHOUT_BOUND = ("sinusoidal",)
_VERDICTS = {True: "reached", False: "missed", None: f"no verdict under {LEAST_DOCUMENTS} documents"}


@dataclass(frozen=True)
class Subject:
    """A model of the original window, measured.

    Attributes:
        means: of documents, as `document_means` gives them.
        sliding: means of documents over 8 windows, read by half-overlapping windows, [N].
    """

    means: Means
    sliding: np.ndarray


def judge(scheme: str, base: Subject, control: Subject, after: Means, seeds: Sequence[Means]) -> dict[str, Any]:
    """Return the three goals and their measurements; with fewer than eight documents there is no verdict.

    Every difference is `after` less the other, paired by document.

    Args:
        scheme: its name.
        base: the untouched base.
        control: the base trained on without a swap, the mean over seeds.
        after: the adapted model, the mean over seeds.
        seeds: the adapted model by seed.

    Example:
        >>> means = {"window": np.arange(8.0), "1": np.arange(8.0), "8": np.arange(8.0) - 0.1}
        >>> means |= {"last window": np.arange(8.0) - 0.1, "last window alone": np.arange(8.0)}
        >>> base = Subject(means, np.arange(8.0))
        >>> [goal["reached"] for goal in judge("rope", base, base, means, [means])["goals"]]
        [True, True, True]
    """
    longest, enough = str(MULTIPLES[-1]), len(after[WINDOW]) >= LEAST_DOCUMENTS
    from_control = difference(control.means[WINDOW], after[WINDOW])
    from_base = difference(base.means[WINDOW], after[WINDOW], _above_base(scheme))
    far = difference(after[LAST_ALONE], after[LAST])
    from_sliding = difference(control.sliding, after[longest])
    from_base_sliding = difference(base.sliding, after[longest])
    goals = [
        {
            "goal": "in the window",
            "reached": from_control["verdict"] == "not worse" and from_base["difference"] <= _above_base(scheme),
        },
        {"goal": "far text helps", "reached": _far_reached(scheme, far)},
        {"goal": "beats the sliding window of the control", "reached": is_below(from_sliding, 0.0)},
    ]
    return {
        "goals": [{**goal, "reached": goal["reached"] if enough else None} for goal in goals],
        "allowed": {"above control": MARGIN, "above base": _above_base(scheme), "far text": _FAR.get(scheme, 0.0)},
        "from_control": from_control,
        "from_base": from_base,
        "far_text": far,
        "from_sliding_control": from_sliding,
        "from_sliding_base": from_base_sliding,
        "by_seed": [
            {
                "from_base": difference(base.means[WINDOW], seed_means[WINDOW])["difference"],
                "far_text": difference(seed_means[LAST_ALONE], seed_means[LAST])["difference"],
                "from_sliding_base": difference(base.sliding, seed_means[longest])["difference"],
            }
            for seed_means in seeds
        ],
        "lengths": [{"windows": m, **mean_with_interval(after[str(m)])} for m in MULTIPLES if str(m) in after],
        "losses": {
            "base": float(base.means[WINDOW].mean()),
            "control": float(control.means[WINDOW].mean()),
            "recipe": float(after[WINDOW].mean()),
            "base, sliding": float(base.sliding.mean()),
            "control, sliding": float(control.sliding.mean()),
            "recipe, 8 windows": float(after[longest].mean()),
        },
    }


def _above_base(scheme: str) -> float:
    return _ABOVE_BASE.get(scheme, _ABOVE_BASE_OTHERS)


def _far_reached(scheme: str, far: dict[str, Any]) -> bool:
    enough = far["difference"] <= _FAR.get(scheme, 0.0)
    return bool(enough and (scheme in _WITHOUT_BOUND or is_below(far, 0.0)))


def markdown(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    texts, top, base = result["texts"], MULTIPLES[-1], result["base"]
    lines = [
        f"# {result['study']}: {result['tokens']:,} tokens on {base['name']}, {base['parameters'] / 1e6:.1f} M "
        f"parameters, window {texts['window']}",
        "",
        f"Measured on {texts['documents']} documents ({texts['source']}), {texts['pieces of a document']} x "
        f"{texts['tokens of a piece']} tokens each; {result['seeds']} seed(s). Nats/token: the recipe less the "
        f"other, its interval, and the upper bound that the goals use. {intervals_said(result)}",
        "",
        f"| recipe | in the window, less the control | less the untouched base | last of {top} windows after the "
        f"others less alone | {top} windows less the control's sliding window | less the base's sliding window |",
        "|---|---|---|---|---|---|",
    ]
    columns = ("from_control", "from_base", "far_text", "from_sliding_control", "from_sliding_base")
    lines += [
        f"| {row_name(row)} | {' | '.join(_change_text(row[key]) for key in columns)} |" for row in result["rows"]
    ]
    lines += ["", "| recipe | goal | allowed | verdict |", "|---|---|---|---|"]
    for row in result["rows"]:
        allowed = row["allowed"]
        limits = (
            f"bound of {allowed['above control']} above the control, {allowed['above base']} above the base",
            f"at most {allowed['far text']}" + ("" if row["scheme"] in _WITHOUT_BOUND else ", and a bound below 0"),
            "a bound below 0",
        )
        for goal, limit in zip(row["goals"], limits, strict=True):
            lines.append(f"| {row_name(row)} | {goal['goal']} | {limit} | {_VERDICTS[goal['reached']]} |")
    lines += ["", "| recipe | base | control | recipe | base, sliding | control, sliding | recipe, 8 windows |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row_name(row)} | {' | '.join(f'{x:.4f}' for x in row['losses'].values())} |" for row in result["rows"]
    ]
    return (
        "\n".join(
            [*lines, "", *(f"    {command}" for command in dict.fromkeys([result["command"], *result["commands"]]))]
        )
        + "\n"
    )


def row_name(row: dict[str, Any]) -> str:
    """Return the name of a row: its recipe, and its variant.

    Example:
        >>> row_name({"recipe": "to-alibi", "variant": "swap.fit=0"})
        'to-alibi, swap.fit=0'
    """
    return ", ".join(filter(None, (row["recipe"], row.get("variant"))))


def _change_text(change: dict[str, Any]) -> str:
    bound = "none" if change["upper"] is None else f"{change['upper']:+.4f}"
    return f"{change['difference']:+.4f} [{interval_text(change, '+.4f', ', ')}], bound {bound}"
