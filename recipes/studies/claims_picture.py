"""Plots of the study of claims: curves, losses by length, and shares of right answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hf_posswap.plotting import canvas
from hf_posswap.utils.atomic_io import replacing

_MARK = canvas.COLOURS[1]
_SCHEMES = ("learned", "sinusoidal", "rope", "alibi", "nope")


def draw_claims(result: dict[str, Any], path: Path) -> None:
    """Plot the results of `recipes.studies.claims`, and write them to `path` (PNG).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    text, shares = result["text"], result["shares"]
    panels: list[Callable[[Any, dict[str, Any]], None]] = [_draw_curves, _draw_readings] if text else []
    panels += [partial(_draw_shares, material=material) for material in shares]
    rows, width = (2, 13.0) if len(panels) > 3 else (1, 4.75 * len(panels))
    picture, axes = canvas.figure(width, 4.1 * rows, rows=rows, columns=-(-len(panels) // rows))
    for ax, panel in zip(axes, panels, strict=False):
        panel(ax, result)
    for ax in axes[len(panels) :]:
        ax.axis("off")
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


def _look(scheme: str) -> dict[str, Any]:
    number = 1 + _SCHEMES.index(scheme)
    return {"color": canvas.COLOURS[number], "marker": canvas.MARKERS[number], "markersize": 4, "label": scheme}


def _draw_curves(ax: Any, result: dict[str, Any]) -> None:
    """Draw the loss during the trainings on text."""
    tokens = result["trained"]["text"]["tokens"] / 1000
    for scheme, scheme_result in result["text"].items():
        curve = scheme_result["curve"]
        tokens_read = [tokens * (point + 1) / len(curve) for point in range(len(curve))]
        ax.plot(tokens_read, curve, linewidth=1.2, **_look(scheme) | {"markevery": max(1, len(curve) // 8)})
    curves = [scheme_result["curve"] for scheme_result in result["text"].values()]
    canvas.plain_log_y(ax, min(map(min, curves)), max(map(max, curves)))
    ax.set_xlabel("thousand tokens read")
    ax.set_ylabel("training loss, nats a token")
    ax.legend(fontsize=8, frameon=False)
    canvas.title(ax, "Text: convergence", f"mean of {result['seeds']} seeds, the same tokens in the same order")


def _draw_readings(ax: Any, result: dict[str, Any]) -> None:
    """Draw the loss on held-out text by how many windows are read at once."""
    for scheme, scheme_result in result["text"].items():
        ax.plot(*_means(scheme_result["losses"]), **_look(scheme))
    _windows(ax, result)
    ax.set_ylabel("nats a token")
    ax.legend(fontsize=8, frameon=False)
    canvas.title(ax, "Text: windows read at once", "the same held-out tokens each time")


def _draw_shares(ax: Any, result: dict[str, Any], *, material: str) -> None:
    """Draw the shares of right answers by length, and where the lengths of training end."""
    for scheme, scheme_shares in result["shares"][material].items():
        ax.plot(*_means(scheme_shares), **_look(scheme))
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel("right answers")
    ax.legend(fontsize=8, frameon=False)
    if material == "needles":
        _windows(ax, result)
        canvas.title(ax, "Needles: passkeys found", f"trained on windows of {result['window']} tokens")
    else:
        ax.axvline(result["longest"], color=_MARK, linewidth=0.5)
        ax.set_xlabel("letters")
        canvas.title(ax, f"Task: {material}", f"trained on up to {result['longest']}; right to the end")


def _means(values_by_name: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    """Return lengths and means over seeds; names that are not lengths are dropped."""
    numbers = {float(name): sum(values) / len(values) for name, values in values_by_name.items() if name[0].isdigit()}
    return list(numbers), list(numbers.values())


def _windows(ax: Any, result: dict[str, Any]) -> None:
    ax.axvline(1, color=_MARK, linewidth=0.5)
    ax.set_xscale("log", base=2)
    ax.set_xticks([0.5, 1, 2, 4, 8] if ax.get_xlim()[0] < 0.9 else [1, 2, 4, 8])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlabel(f"windows of {result['window']} tokens")
