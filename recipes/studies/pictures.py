"""The pictures of the studies of adaptation: differences from control and base, and the loss by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posswap.plotting import canvas
from hf_posswap.utils.atomic_io import replacing

_SWAPPED, _CONTROL, _ALLOWED = canvas.COLOURS[2], canvas.COLOURS[1], canvas.COLOURS[3]


def draw_judgement(result: dict[str, Any], path: Path) -> None:
    """Draw what `recipes.studies.learned_to_rope` found, and write it to `path` (PNG).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    picture, (left, right) = canvas.figure(11.0, 4.6, columns=2)
    _differences(left, result["in_window"])
    _lengths(right, result)
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


def _differences(ax: Any, found: dict[str, Any]) -> None:
    """Draw the difference from the control in the window, by seed and of all, with intervals over documents."""
    rows = [*((f"seed {n}", row) for n, row in enumerate(found["by_seed"])), ("all seeds", found)]
    for place, (_, row) in enumerate(rows):
        last = place == len(rows) - 1
        spans = [[row["difference"] - row["low"]], [row["high"] - row["difference"]]]
        ax.errorbar(
            [row["difference"]], [place], xerr=spans, fmt="o", capsize=3, color=_SWAPPED if last else canvas.FAINT
        )
        if last:
            ax.plot([row["upper"]], [place], marker="|", markersize=14, color=_SWAPPED)
    ax.axvline(0, color=_CONTROL, linewidth=1)
    ax.axvline(found["margin"], color=_ALLOWED, linewidth=1, linestyle="--")
    ax.annotate("allowed", (found["margin"], 1), xycoords=("data", "axes fraction"), fontsize=8, color=_ALLOWED)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlabel("nats a token above the control")
    canvas.title(ax, "In the window", "95 % intervals over documents; the bar is the one-sided bound")


def _lengths(ax: Any, result: dict[str, Any]) -> None:
    """Draw the loss of the swapped model by length, before and after training."""
    window, rows = result["texts"]["window"], result["lengths"]
    lengths = [window * row["windows"] for row in rows]
    ax.plot(lengths, [row["nll"] for row in rows], marker="o", color=_SWAPPED, label="recipe")
    ax.fill_between(lengths, [r["low"] for r in rows], [r["high"] for r in rows], color=_SWAPPED, alpha=0.15)
    ax.plot(lengths, [row["before"] for row in rows], marker="s", color=canvas.FAINT, label="swapped, not trained")
    allowed = rows[0]["nll"] + result["to_longest"]["margin"]
    ax.axhline(allowed, color=_ALLOWED, linewidth=1, linestyle="--", label="allowed")
    canvas.length_axis(ax, lengths, window)
    ax.set_xlabel("tokens read at once")
    ax.set_ylabel("nats a token")
    ax.legend(frameon=False, fontsize=9)
    canvas.title(ax, "Beyond it", f"{result['texts']['documents']} documents, {result['tokens']:,} tokens of training")


def draw_goals(result: dict[str, Any], path: Path) -> None:
    """Draw what `recipes.studies.adaptation` found, and write it to `path` (PNG).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    picture, axes = canvas.figure(12.0, 1.6 + 0.9 * len(result["rows"]) + 1.0, columns=3)
    shown = (
        ("from_base", "In the window", "above the untouched base", "above base"),
        ("far_text", "Far text", "the last window after the others, less alone", "far text"),
        ("from_sliding_control", "Eight windows", "above the control's sliding window", None),
    )
    for ax, (key, head, said, allowed) in zip(axes, shown, strict=True):
        for place, row in enumerate(result["rows"]):
            found = row[key]
            spans = [[found["difference"] - found["low"]], [found["high"] - found["difference"]]]
            ax.errorbar([found["difference"]], [place], xerr=spans, fmt="o", capsize=3, color=_SWAPPED)
            limit = 0.0 if allowed is None else row["allowed"][allowed]
            ax.plot([limit], [place], marker="|", markersize=22, color=_ALLOWED)
        ax.axvline(0, color=_CONTROL, linewidth=1)
        ax.set_yticks(range(len(result["rows"])), [row["recipe"] for row in result["rows"]])
        ax.set_ylim(len(result["rows"]) - 0.5, -0.5)
        ax.set_xlabel(f"nats a token, {said}", fontsize=8)
        canvas.title(ax, head, "95 % intervals; the bar is allowed")
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})
