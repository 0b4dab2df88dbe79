"""The pictures of the studies: differences from base and control and what was allowed, and what comes with length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hf_posswap.plotting import canvas
from hf_posswap.utils.atomic_io import replacing

_SWAPPED, _CONTROL, _ALLOWED = canvas.COLOURS[2], canvas.COLOURS[1], canvas.COLOURS[3]


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
        ax.locator_params(axis="x", nbins=5)  # so that numbers do not touch
        canvas.title(ax, head, "95 % intervals; the bar is allowed")
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


def draw_found(result: dict[str, Any], path: Path) -> None:
    """Draw what `recipes.studies.retrieval` found, by length, and write it to `path` (PNG).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    picture, (ax,) = canvas.figure(7.0, 4.0, columns=1)
    names = list(dict.fromkeys(row["recipe"] for row in result["rows"]))
    for row in result["rows"]:
        colour = _CONTROL if row["recipe"] == "base" else canvas.COLOURS[1 + names.index(row["recipe"])]
        line = "--" if row["state"] == "before training" else "-"
        lengths = [float(multiple) for multiple in row["found"]]
        shares = [found / asked for found, asked in row["found"].values()]
        ax.plot(lengths, shares, line, marker="o", color=colour, label=f"{row['recipe']}, {row['state']}")
    ax.axvline(1, color=_CONTROL, linewidth=0.5)
    ax.set_xscale("log", base=2)
    ticks = [float(multiple) for multiple in result["rows"][0]["found"]]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_ylim(-0.03, 1.03)
    ax.set_xlabel("windows of the base")
    ax.set_ylabel("needles found")
    ax.legend(fontsize=8, frameon=False)
    canvas.title(ax, "Needles found by length", "passkeys at five depths")
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


def draw_claims(result: dict[str, Any], path: Path) -> None:
    """Draw what `recipes.studies.claims` measured, and write it to `path` (PNG).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    text, shares = result["text"], result["shares"]
    panels: list[Callable[[Any, dict[str, Any]], None]] = [_draw_curves, _draw_readings] if text else []
    panels += [partial(_draw_shares, material=material) for material in shares]
    picture, axes = canvas.figure(13.0 if len(panels) > 2 else 9.5, 8.0 if len(panels) > 3 else 4.2,
                                  rows=1 + (len(panels) > 3), columns=min(3, len(panels)))  # fmt: skip
    for ax, panel in zip(axes, panels, strict=False):
        panel(ax, result)
    for ax in axes[len(panels) :]:
        ax.axis("off")
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


_SCHEMES = ("learned", "sinusoidal", "rope", "alibi", "nope")


def _look(scheme: str) -> dict[str, Any]:
    number = 1 + _SCHEMES.index(scheme)
    return {"color": canvas.COLOURS[number], "marker": canvas.MARKERS[number], "markersize": 4, "label": scheme}


def _draw_curves(ax: Any, result: dict[str, Any]) -> None:
    """Draw the loss during the trainings on text."""
    tokens = result["trained"]["text"]["tokens"] / 1000
    for scheme, held in result["text"].items():
        curve = held["curve"]
        read = [tokens * (point + 1) / len(curve) for point in range(len(curve))]
        ax.plot(read, curve, linewidth=1.2, **_look(scheme) | {"markevery": max(1, len(curve) // 8)})
    curves = [held["curve"] for held in result["text"].values()]
    canvas.plain_log_y(ax, min(map(min, curves)), max(map(max, curves)))
    ax.set_xlabel("thousand tokens read")
    ax.set_ylabel("training loss, nats a token")
    ax.legend(fontsize=8, frameon=False)
    canvas.title(ax, "Text: convergence", f"mean of {result['seeds']} seeds, the same tokens in the same order")


def _draw_readings(ax: Any, result: dict[str, Any]) -> None:
    """Draw the loss on held-out text by how many windows are read at once."""
    for scheme, held in result["text"].items():
        ax.plot(*_means(held["losses"]), **_look(scheme))
    _windows(ax, result)
    ax.set_ylabel("nats a token")
    ax.legend(fontsize=8, frameon=False)
    canvas.title(ax, "Text: windows read at once", "the same held-out tokens each time")


def _draw_shares(ax: Any, result: dict[str, Any], *, material: str) -> None:
    """Draw the shares of right answers by length, and where the lengths of training end."""
    for scheme, held in result["shares"][material].items():
        ax.plot(*_means(held), **_look(scheme))
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel("right answers")
    ax.legend(fontsize=8, frameon=False)
    if material == "needles":
        _windows(ax, result)
        canvas.title(ax, "Needles: passkeys found", f"trained on windows of {result['window']} tokens")
    else:
        ax.axvline(result["longest"], color=_CONTROL, linewidth=0.5)
        ax.set_xlabel("letters")
        canvas.title(ax, f"Task: {material}", f"trained on up to {result['longest']}; right to the end")


def _means(held: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    """Return lengths and means over seeds; names that are no length are left out."""
    numbers = {float(name): sum(found) / len(found) for name, found in held.items() if name[0].isdigit()}
    return list(numbers), list(numbers.values())


def _windows(ax: Any, result: dict[str, Any]) -> None:
    ax.axvline(1, color=_CONTROL, linewidth=0.5)
    ax.set_xscale("log", base=2)
    ax.set_xticks([0.5, 1, 2, 4, 8] if ax.get_xlim()[0] < 0.9 else [1, 2, 4, 8])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlabel(f"windows of {result['window']} tokens")
