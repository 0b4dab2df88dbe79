"""The plan of a swap, as a value, and as text: the rows of its edits, and the table that `print(plan)` shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_posswap.families.sites import Sites, TokenTable
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.edit import Edit, from_plain, to_plain
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.sites.attention.backends import describe_backends
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.schemes.base import Scheme, make_scheme
from hf_posswap.utils import html_tables
from hf_posswap.utils.format import human_bytes
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.result_views import ResultView

_PLAIN = ("model", "route", "cached_equals_full", "unused", "added", "adaptation", "max_length", "notes")
_ROUTES = {
    "native": "native: stock transformers runs the saved checkpoint",
    "plugin": "plugin: the saved checkpoint needs hf_posswap; stock transformers refuses it",
}
_CONSISTENT = "cached and full forward agree"
_INCONSISTENT = "cached and full forward differ beyond the original length: the angles follow the current length"
_SHARDABLE = "a sequence may be split over devices (context parallelism)"
_WHOLE = "whole sequences only, not for context parallelism"
Row = tuple[str, str, str, str]
EDIT_HEADER: Row = ("site", "path", "before", "after")


@dataclass(frozen=True, repr=False)
class SwapPlan(ResultView):
    """What `patch_model` will do, or did. `print(plan)` shows it as a table.

    It is a value: two plans of the same swap are equal, and a plan can be pickled, or written to JSON and read back.

    Attributes:
        model: class name of the model.
        scheme: with every parameter filled in; of the decoder, if a model has several stacks and the decoder is
            swapped.
        schemes: of every swapped stack, by stack name: "" if a model has only one.
        edits: in order.
        route: "native": stock transformers will run the saved checkpoint; "plugin": only hf_posswap will.
        cached_equals_full: whether decoding with a cache equals one full forward, at any length.
        unused: parameters that the swap disables, by name, with their numbers of elements.
        added: parameters that the swap adds, by name, with their numbers of elements.
        adaptation: the training that the swapped model will need.
        max_length: positions the swapped model is meant for, in tokens.
        notes: anything else worth knowing.
        record: written to `config.posswap`.
        sites: where the model's positions are.

    Example:
        >>> from hf_posswap import plan_swap
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> plan = plan_swap(model, "alibi", max_length=64)
        >>> plan.route, plan.max_length, plan.unused
        ('plugin', 64, {'transformer.wpe.weight': 128})
    """

    model: str
    scheme: Scheme
    schemes: dict[str, Scheme]
    edits: tuple[Edit, ...]
    route: Literal["native", "plugin"]
    cached_equals_full: bool
    unused: dict[str, int]
    added: dict[str, int]
    adaptation: str
    max_length: int
    notes: tuple[str, ...]
    record: SwapRecord
    sites: Sites

    def _repr_facts(self) -> dict[str, object]:
        return {
            "model": self.model,
            "scheme": self.named,
            "route": self.route,
            "max_length": self.max_length,
            "edits": len(self.edits),
        }

    def __str__(self) -> str:
        return table(self.title, self.edit_rows(), self.fact_rows())

    def _repr_html_(self) -> str:
        edits = html_tables.table(self.edit_rows(), EDIT_HEADER)
        return html_tables.together([html_tables.title(self.title), edits, html_tables.table(self.fact_rows())])

    def edit_rows(self) -> list[Row]:
        """Return one row per edit: site, path, before, after; edits that differ only in the layer number share one."""
        return edit_rows(self.edits)

    def fact_rows(self) -> list[tuple[str, str]]:
        """Return the consequences of the edits as names and values."""
        added = (edit for edit in self.edits if isinstance(edit, AddMechanism))
        backends = dict.fromkeys(text for edit in added for text in describe_backends(edit.scheme, edit.geometry))
        tables = self.route == "native" and any(isinstance(stack.table, TokenTable) for stack in self.sites.stacks)
        limited = " with hf_posswap; in stock transformers its table ends there" if tables else ""
        return [
            ("route", _ROUTES[self.route]),
            ("length", f"{self.max_length} positions" + (f", runs beyond{limited}" if self.unbounded else "")),
            ("cache", _CONSISTENT if self.cached_equals_full else _INCONSISTENT),
            ("parallel", _SHARDABLE if self.shardable else _WHOLE),
            *(("backend", text) for text in backends),
            ("unused", sizes(self.unused)),
            ("new", sizes(self.added)),
            ("adaptation", self.adaptation),
            *(("note", note) for note in self.notes),
        ]

    @property
    def title(self) -> str:
        """Model and scheme, as text."""
        return f"{self.model}: {self.named}"

    @property
    def unbounded(self) -> bool:
        """Whether the swapped model runs at any length."""
        return all(scheme.traits.unbounded for scheme in self.schemes.values())

    @property
    def shardable(self) -> bool:
        """Whether a sequence may be split over devices."""
        return all(scheme.traits.shardable for scheme in self.schemes.values())

    @property
    def named(self) -> str:
        """The scheme, or the schemes of the stacks if they differ, as text."""
        if len(set(map(str, self.schemes.values()))) == 1:
            return str(self.scheme)
        return ", ".join(f"{stack}: {scheme}" for stack, scheme in self.schemes.items())

    @property
    def choice(self) -> Scheme | dict[str, Scheme]:
        """The `scheme` argument of `plan_swap` that gives this plan."""
        return self.schemes.get("", dict(self.schemes))

    def with_schemes(self, schemes: dict[str, Scheme]) -> SwapPlan:
        """Return the plan with updated `schemes`: the same types of schemes with other values."""
        main = list(schemes.values())[-1]
        stacks = None if "" in schemes else {name: scheme.to_dict() for name, scheme in schemes.items()}
        record = replace(self.record, scheme=main.to_dict(), stacks=stacks)
        edits = tuple(edit.with_scheme(schemes[edit.stack]) if edit.stack in schemes else edit for edit in self.edits)
        old = [note for scheme in self.schemes.values() for note in scheme.notes()]
        new = (note for scheme in schemes.values() for note in scheme.notes())
        notes = tuple(dict.fromkeys([*(note for note in self.notes if note not in old), *new]))
        return replace(self, scheme=main, schemes=schemes, record=record, edits=edits, notes=notes)

    def place(self, edit: Edit) -> tuple[Scheme, Geometry]:
        """Return the scheme and the geometry of the stack of `edit`."""
        return self.schemes[edit.stack], self.sites.stack(edit.stack).geometry

    def to_dict(self) -> dict[str, object]:
        """Return the plan as JSON for `from_dict`."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "notes": list(self.notes),
            "scheme": self.scheme.to_dict(),
            "schemes": {name: scheme.to_dict() for name, scheme in self.schemes.items()},
            "edits": [edit.to_dict() for edit in self.edits],
            "record": self.record.to_dict(),
            "sites": to_plain(self.sites.to_dict()),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SwapPlan:
        """Return the plan that `to_dict` wrote.

        Example:
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> from hf_posswap import plan_swap
            >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
            >>> plan = plan_swap(model, "rope", max_length=64)
            >>> SwapPlan.from_dict(plan.to_dict()) == plan
            True
        """
        plain = {name: values[name] for name in _PLAIN} | {"notes": tuple(values["notes"])}
        return cls(
            **plain,
            scheme=make_scheme(values["scheme"]),
            schemes={name: make_scheme(scheme) for name, scheme in values["schemes"].items()},
            edits=tuple(Edit.from_dict(edit) for edit in values["edits"]),
            record=SwapRecord.from_dict(values["record"]),
            sites=Sites.from_dict(from_plain(values["sites"])),
        )


def table(title: str, rows: list[Row], facts: list[tuple[str, str]]) -> str:
    """Return a title, a table of edits and their consequences, as text."""
    lines = [EDIT_HEADER, *rows]
    widths = [max(len(row[i]) for row in lines) for i in range(4)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines]
    shown.insert(1, "  ".join("-" * width for width in widths))
    return in_lines([title, "", *shown, "", *(f"{name:<11} {value}" for name, value in facts)])


def edit_rows(edits: Iterable[Edit]) -> list[Row]:
    """Return one row per edit, with the columns of EDIT_HEADER; edits that differ only in the layer share a row."""
    groups: dict[Row, list[str]] = {}
    for edit in edits:
        pattern = ".".join("*" if segment.isdigit() else segment for segment in edit.path.split("."))
        groups.setdefault((edit.site, pattern, edit.before, edit.after), []).append(edit.path)
    rows = []
    for (site, pattern, before, after), paths in groups.items():
        shown = paths[0] if len(paths) == 1 else f"{pattern} ({len(paths)} layers)"
        rows.append((site, shown, before, after))
    return rows


def sizes(parameters: dict[str, int]) -> str:
    """Return parameters and their numbers of elements as text."""
    if not parameters:
        return "no parameters"
    return ", ".join(
        f"{name} ({count} values, {human_bytes(4 * count)} in float32)" for name, count in parameters.items()
    )
