"""Each scheme whole, from the registry: formula, source, promises, support, fields, and how to cite it."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from typing import Any

from repository import PAGES, ROOT

from generated.bibliography import bibtex
from generated.markup import facts, fenced, literal, prose, table
from hf_posswap.cli.listing import describe_fields, format_value
from hf_posswap.schemes import SCHEMES, Traits
from hf_posswap.utils.scheme_text import attribute_docs, description


def render() -> str:
    """Return a list of the schemes and a section for each."""
    known = list(SCHEMES.items())
    rows = [[f"[`{name}`](#{name.replace('_', '_')})", cls.kind, cls.summary] for name, cls in known]
    sections = [table(["scheme", "kind", "what it is"], rows)]
    for name, cls in known:
        sections.append(_section(name, cls))
    return "\n\n".join(sections)


def _section(name: str, cls: Any) -> str:
    fields = describe_fields(cls)
    properties = [("kind", cls.kind), ("for", ", ".join(sorted(_inputs(cls)))), ("source", f"<{cls.source}>")]
    if not any(field["required"] for field in fields):
        properties.append(("promises", _promises(cls().traits)))
    works = support(name)
    if works:
        properties.append(("works in", works))
    summary = f"{cls.summary[0].upper()}{cls.summary[1:]}."
    formula, *paragraphs = description(cls).split("\n\n")
    shown = textwrap.fill(" ".join(formula.split()), 84, break_long_words=False, break_on_hyphens=False)
    sections = [f"### {name}", summary, fenced(shown), *map(prose, paragraphs), facts(properties)]
    if fields:
        rows = [
            [f"`{f['name']}`", literal(f["type"]), "(required)" if f["required"] else f"`{format_value(f['default'])}`",
             prose(f["meaning"])]
            for f in fields
        ]  # fmt: skip
        sections.append(table(["field", "type", "default", "meaning"], rows))
    cited = bibtex(cls.source)
    if cited:
        sections.append(f'<details markdown="1">\n<summary>BibTeX</summary>\n\n{fenced(cited, "bibtex")}\n\n</details>')
    return "\n\n".join(sections)


def _inputs(cls: Any) -> tuple[str, ...]:
    return (cls.inputs,) if isinstance(cls.inputs, str) else tuple(cls.inputs)


def _promises(traits: Traits) -> str:
    names = [name.replace("_", "-") for name, value in dataclasses.asdict(traits).items() if value]
    return ", ".join(names) or "none"


def support(name: str) -> str:
    """Return in how many classes the support table has the scheme, natively and with the plugin."""
    page = (ROOT / PAGES / "support.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if re.match(r"\| (classes \| model types|\d+ \|)", line)]
    head = [cell.strip().split(", ") for cell in lines[0].strip("|").split("|")]
    column = next((number for number, names in enumerate(head) if number > 1 and name in names), None)
    if column is None:
        return ""
    totals = {"native": 0, "plugin": 0}
    for line in lines[1:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[column] in totals:
            totals[cells[column]] += int(cells[0])
    counts = ", ".join(f"{kind} in {count}" for kind, count in totals.items() if count)
    return f"{counts} [classes of language models](support.md)"


def traits() -> str:
    """Return what each promise means."""
    return table(["promise", "meaning"], [[f"`{name}`", text] for name, text in attribute_docs(Traits).items()])
