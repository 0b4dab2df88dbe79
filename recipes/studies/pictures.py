"""The pictures of the studies: differences from base and control and what was allowed, and what comes with length."""

from __future__ import annotations

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
    picture, axes = canvas.figure(13.0, 8.0, rows=2, columns=3)
    looks = {scheme: dict(color=canvas.COLOURS[1 + i], label=scheme) for i, scheme in enumerate(result["text"])}
    marks = {scheme: dict(marker=canvas.MARKERS[1 + i], markersize=4) for i, scheme in enumerate(result["text"])}
    tokens, window, longest = result["trained"]["text"]["tokens"], result["window"], result["longest"]
    for scheme, held in result["text"].items():
        curve = held["curve"]
        read = [tokens / 1000 * (i + 1) / len(curve) for i in range(len(curve))]
        axes[0].plot(read, curve, linewidth=1.2, **looks[scheme])
        losses = {float(m): sum(found) / len(found) for m, found in held["losses"].items()}
        axes[1].plot(list(losses), list(losses.values()), **looks[scheme], **marks[scheme])
    low, high = min(min(held["curve"]) for held in result["text"].values()), result["text"]["rope"]["curve"][0]
    canvas.plain_log_y(axes[0], low, high)
    axes[0].set_xlabel("thousand tokens read")
    axes[0].set_ylabel("training loss, nats a token")
    canvas.title(axes[0], "Text: convergence", f"mean of {result['seeds']} seeds, same tokens in the same order")
    axes[1].set_ylabel("nats a token")
    canvas.title(axes[1], "Text: windows read at once", "the same held-out tokens each time")
    _draw_shares(axes[2], result["shares"]["needles"], looks, marks, 1.0)
    canvas.title(axes[2], "Needles: passkeys found", f"trained on windows of {window} tokens")
    for ax, held in zip(
        axes[1:3], (result["text"]["alibi"]["losses"], result["shares"]["needles"]["alibi"]), strict=True
    ):
        ax.set_xscale("log", base=2)
        ax.set_xticks([float(m) for m in held], list(held))
        ax.minorticks_off()
        ax.set_xlabel(f"windows of {window} tokens")
    for ax, task in zip(axes[3:5], ("copy", "sorting"), strict=True):
        lengths = {s: {n: v for n, v in held.items() if n.isdigit()} for s, held in result["shares"][task].items()}
        _draw_shares(ax, lengths, looks, marks, longest)
        ax.set_xlabel("letters")
        canvas.title(ax, f"Task: {task}", f"trained on up to {longest}; right to the end")
    axes[5].axis("off")
    axes[5].legend(*axes[1].get_legend_handles_labels(), loc="center", frameon=False, fontsize=12)
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


def _draw_shares(ax: Any, shares: dict[str, dict[str, list[float]]], looks: Any, marks: Any, trained: float) -> None:
    """Draw mean shares of right answers by length, and where the lengths of training end."""
    for scheme, held in shares.items():
        means = {float(length): sum(found) / len(found) for length, found in held.items()}
        ax.plot(list(means), list(means.values()), **looks[scheme], **marks[scheme])
    ax.axvline(trained, color=_CONTROL, linewidth=0.5)
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel("right answers")
