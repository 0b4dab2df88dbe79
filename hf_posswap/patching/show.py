"""Plans as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_posswap.patching.backends import told

if TYPE_CHECKING:
    from hf_posswap.patching.plan import SwapPlan


def plan_table(plan: SwapPlan) -> str:
    """Return `plan` as a table of its edits and what follows from them."""
    rows = [EDIT_HEADER, *edit_rows(plan)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([f"{plan.model}: {plan.named}", "", *lines, "", *(f"{k:<11} {v}" for k, v in fact_rows(plan))])


def fact_rows(plan: SwapPlan) -> list[tuple[str, str]]:
    """Return what follows from `plan`: names and values."""
    return [
        ("route", "native: stock transformers runs the saved checkpoint" if plan.route == "native" else _PLUGIN),
        ("length", f"{plan.max_length} positions" + ("" if not plan.unbounded else ", runs beyond")),
        ("cache", _CONSISTENT if plan.cached_equals_full else _INCONSISTENT),
        ("parallel", _SHARDABLE if all(s.traits.shardable for s in plan.schemes.values()) else _WHOLE),
        *(("backend", way) for way in told(plan)),
        ("unused", _sizes(plan.unused)),
        ("new", _sizes(plan.added)),
        ("adaptation", plan.adaptation),
        *(("note", note) for note in plan.notes),
    ]


EDIT_HEADER = ("site", "path", "before", "after")
_PLUGIN = "plugin: the saved checkpoint needs hf_posswap; stock transformers refuses it"
_CONSISTENT = "cached and full forward agree"
_INCONSISTENT = "cached and full forward differ beyond the original length: the angles follow the current length"
_SHARDABLE = "a sequence may be split over devices (context parallelism)"
_WHOLE = "whole sequences only, not for context parallelism"


def edit_rows(plan: SwapPlan) -> list[tuple[str, str, str, str]]:
    """Return a row an edit, as EDIT_HEADER says, with edits that differ only in a layer's number in one row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for edit in plan.edits:
        pattern = ".".join("*" if part.isdigit() else part for part in edit.path.split("."))
        groups.setdefault((edit.site, pattern, edit.before, edit.after), []).append(edit.path)
    rows = []
    for (site, pattern, before, after), paths in groups.items():
        shown = paths[0] if len(paths) == 1 else f"{pattern} ({len(paths)} layers)"
        rows.append((site, shown, before, after))
    return rows


def brief(value: Any) -> str:
    """Return a value as a plan shows it: numbers short, long lists by their length."""
    if isinstance(value, dict):
        return ", ".join(f"{k}={brief(v)}" for k, v in value.items())
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)} numbers]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sizes(parameters: dict[str, int]) -> str:
    if not parameters:
        return "no parameters"
    return ", ".join(
        f"{name} ({count} values, {human_bytes(4 * count)} in float32)" for name, count in parameters.items()
    )


def human_bytes(count: float) -> str:
    """Return a number of bytes as people write it: 1536 is 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError
