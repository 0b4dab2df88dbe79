"""Plots of the studies: results by length, or compared with the allowed limits."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from hf_posswap.evaluation import ratio_interval
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.plotting import canvas
from hf_posswap.utils.atomic_io import replacing
from recipes.studies.goals import row_name
from recipes.studies.measuring import MULTIPLES
from recipes.studies.real_model_tables import KEPT, SLIDING, above_base, by_reader

_UNSWAPPED = ("s", "o", "*")
"""Markers of the unswapped base's results."""
_NEAR = 0.7
"""Nats a token from zero within which a line decides the height of the picture."""
_LINE = 32
"""Most letters of a row's name in a line."""
_SWAPPED, _CONTROL, _ALLOWED = canvas.COLOURS[2], canvas.COLOURS[1], canvas.COLOURS[3]


def draw_goals(result: dict[str, Any], path: Path) -> None:
    """Plot the results of `recipes.studies.adaptation`, and write them to `path` (PNG).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    rows = result["rows"]
    picture, axes = canvas.figure(13.0, 1.6 + 0.6 * len(rows) + 1.0, columns=3)
    shown = (
        ("from_base", "In the window", "above the untouched base", "above base"),
        ("far_text", "Far text", "the last window after the others, less alone", "far text"),
        ("from_sliding_control", "Eight windows", "above the control's sliding window", None),
    )
    names = ["\n".join(textwrap.wrap(row_name(row), _LINE)) for row in rows]
    for ax, (key, head, axis_text, allowed) in zip(axes, shown, strict=True):
        for y, row in enumerate(rows):
            change = row[key]
            low, high = (change["difference"] if change[end] is None else change[end] for end in ("low", "high"))
            spans = [[change["difference"] - low], [high - change["difference"]]]
            ax.errorbar([change["difference"]], [y], xerr=spans, fmt="o", capsize=3, color=_SWAPPED)
            limit = 0.0 if allowed is None else row["allowed"][allowed]
            ax.plot([limit], [y], marker="|", markersize=22, color=_ALLOWED)
        ax.axvline(0, color=_CONTROL, linewidth=1)
        ax.set_yticks(range(len(rows)), names if ax is axes[0] else [""] * len(rows))
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlabel(f"nats a token, {axis_text}", fontsize=8)
        ax.locator_params(axis="x", nbins=5)  # so that numbers do not touch
        canvas.title(ax, head, "95 % intervals; the bar is allowed")
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


def draw_beyond(result: dict[str, Any], path: Path) -> None:
    """Plot the losses of `recipes.studies.real_model` by position, less the sliding window's, to `path` (PNG).

    Nothing is drawn without documents that the sliding window has read too.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    books = by_reader(result["units"])
    window, block = result["model"]["window"], result["block"]
    least = books.get(SLIDING, {})
    shown = [name for name in books if name != SLIDING and len(set(books[name]) & set(least)) >= LEAST_DOCUMENTS]
    if not shown:
        return
    picture, (ax,) = canvas.figure(8.0, 4.6, columns=1)
    width = max(1, window // 4 // block)
    while result["length"] // block % width:
        width -= 1
    means = {}
    for name in shown:
        both = [document for document in books[name] if document in least]
        apart = np.array([books[name][document] - least[document] for document in both])  # [N, blocks]
        means[name] = apart.reshape(len(both), -1, width).mean(axis=2)  # [N, parts]
    near = [parts.mean(axis=0) for parts in means.values() if np.abs(parts.mean(axis=0)).max() < _NEAR]
    top = 1.15 * max((float(part.max()) for part in near), default=_NEAR)
    for number, (name, parts) in enumerate(means.items()):
        middles = (np.arange(parts.shape[1]) + 0.5) * width * block / 1024
        colour = canvas.COLOURS[number % len(canvas.COLOURS)]
        marker, line = ("o", "-") if number < len(canvas.COLOURS) else ("s", "--")
        ends = np.array(
            [ratio_interval(part, np.ones(len(part))) or (part.mean(),) * 2 for part in parts.T]
        )  # [parts, 2]
        hidden = ", above the picture" if parts.mean(axis=0).min() > top else ""
        ax.fill_between(middles, ends[:, 0], ends[:, 1], color=colour, alpha=0.2, linewidth=0)
        ax.plot(
            middles, parts.mean(axis=0), marker=marker, linestyle=line, markersize=3, color=colour, label=name + hidden
        )
    bottom = min((float(part.min()) for part in near), default=0.0)
    ax.set_ylim(min(1.4 * bottom, -0.25 * top), top)
    ax.axhline(0, color=_CONTROL, linewidth=1)
    ax.axvline(window / 1024, color=_CONTROL, linewidth=0.5, linestyle="--")
    ax.set_xlabel("position, thousands of tokens")
    ax.set_ylabel("nats a token, less the sliding window's")
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    name, count = result["model"]["name"].partition(".")[0], max(len(books[one]) for one in shown)
    canvas.title(
        ax,
        f"{name}: {result['length']:,} tokens read at once",
        f"{count} books, 95 % intervals; 0: the base's sliding window",
    )
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


def draw_kept(result: dict[str, Any], path: Path) -> None:
    """Plot what other mechanisms lose by `recipes.studies.real_model within`, by tokens of training, to `path` (PNG).

    Only mechanisms that were trained are drawn; of a number of tokens in two dtypes the one with more documents.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    above = above_base(result["units"])
    by_name: dict[str, dict[int, dict[str, float]]] = {}
    for (name, _), budgets in above.items():
        for tokens, documents in budgets.items():
            if len(documents) > len(by_name.setdefault(name, {}).get(tokens, ())):
                by_name[name][tokens] = documents
    shown = {name: budgets for name, budgets in by_name.items() if max(budgets)}
    if not shown:
        return
    picture, (ax,) = canvas.figure(8.0, 4.6, columns=1)
    least = min(tokens for budgets in shown.values() for tokens in budgets if tokens)
    for number, (name, budgets) in enumerate(shown.items()):
        colour, places = canvas.COLOURS[number % len(canvas.COLOURS)], sorted(budgets)
        losses = [np.array(list(budgets[tokens].values())) for tokens in places]
        ends = np.array([ratio_interval(loss, np.ones(len(loss))) or (loss.mean(),) * 2 for loss in losses])
        at = [tokens or least / 2 for tokens in places]
        middle = np.array([loss.mean() for loss in losses])
        spans = np.stack([middle - ends[:, 0], ends[:, 1] - middle])
        ax.errorbar(at, middle, yerr=spans, marker="o", markersize=4, capsize=2, color=colour, label=name)
    ax.axhline(-np.log(KEPT), color=_CONTROL, linewidth=1, linestyle="--")
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=0.03)  # a trained model may be below the base
    ticks = [least / 2, *sorted({tokens for budgets in shown.values() for tokens in budgets if tokens})]
    ax.set_xticks(ticks, ["none", *(f"{tokens / 2**20:.2g} M" for tokens in ticks[1:])])
    ax.minorticks_off()
    ax.set_xlabel(f"tokens of training (M: {2**20:,})")
    ax.set_ylabel("nats a token above the base")
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    name = result["model"]["name"].partition(".")[0]
    canvas.title(ax, f"{name}: other mechanisms, by tokens", f"95 % intervals; the dashed line: {KEPT:.0%} kept")
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


def draw_found(result: dict[str, Any], path: Path) -> None:
    """Plot the results of `recipes.studies.retrieval` by length, and write them to `path` (PNG).

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
        shares = [hits / total for hits, total in row["found"].values()]
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


def draw_extension(result: dict[str, Any], path: Path) -> None:
    """Plot the losses of `recipes.studies.extension` before and after training, and write them to `path` (PNG).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    picture, axes = canvas.figure(11.0, 4.2, columns=2)
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    looks = dict(zip(methods, zip(canvas.COLOURS[1:], canvas.MARKERS[1:], strict=False), strict=False))
    trained = f"{result['tokens']:,} tokens, {result['seeds']} seed(s)"
    for ax, state, subtitle in zip(axes, ("before training", "trained"), ("no training", trained), strict=True):
        for row in (row for row in result["rows"] if row["state"] in (state, "as it is")):
            colour, marker = looks[row["method"]]
            counts, losses = zip(*((cell["windows"], cell["nll"]) for cell in row["lengths"]), strict=True)
            ax.plot(counts, losses, marker=marker, color=colour, label=row["method"])
        ax.set_xscale("log", base=2)
        ax.set_xticks(MULTIPLES, [f"{count}" for count in MULTIPLES])
        ax.set_xlabel("windows of the base, read at once")
        ax.set_ylabel("nats a token")
        canvas.title(ax, state.capitalize(), subtitle)
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})


def draw_ways(result: dict[str, Any], path: Path) -> None:
    """Plot the results of `recipes.studies.encoders`, a panel per task, and write them to `path` (PNG).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.
    """
    rows, window = result["rows"], result["base"]["window"]
    tasks = list(dict.fromkeys(cell["task"] for cell in rows[0]["cells"]))
    picture, axes = canvas.figure(5.5 * len(tasks), 4.6, columns=len(tasks))
    for ax, task in zip(axes, tasks, strict=True):
        swapped, unswapped = iter(zip(canvas.COLOURS[2:], canvas.MARKERS[2:], strict=True)), iter(_UNSWAPPED)
        for row in rows:
            cells = [cell for cell in row["cells"] if cell["task"] == task]
            lengths = [cell["length"] for cell in cells]
            shares = [cell["accuracy"]["mean"] for cell in cells]
            whole = row["vectors"] == "whole"
            colour, marker = next(swapped) if whole else (_CONTROL, next(unswapped))
            ax.plot(lengths, shares, "-" if whole else "--", marker=marker, color=colour, label=row["way"])
        canvas.length_axis(ax, lengths, window)
        ax.axhline(1 / cells[0]["documents"], color=canvas.FAINT, linewidth=0.7)
        ax.set_ylim(-0.03, 1.03)
        ax.set_xlabel("tokens of a document")
        ax.set_ylabel("questions whose document is the nearest")
        canvas.title(ax, f"{task}s".capitalize(), "dashed: the base unswapped; faint: chance")
    axes[0].legend(fontsize=8, frameon=False)
    with replacing(path) as temporary:
        picture.savefig(temporary, format="png", metadata={"Software": None})
