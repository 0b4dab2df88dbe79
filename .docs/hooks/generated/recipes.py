"""The recipes, from the headers of their files."""

from __future__ import annotations

import re

from generated.markup import facts, table
from hf_posswap.training.config.shipped import shipped_recipes


def render() -> str:
    """Return a table of the recipes, what their headers say of each, and the files for accelerate launch."""
    known = shipped_recipes()
    trains = {name: recipe for name, recipe in known.items() if recipe.trains}
    out = [table(["recipe", "purpose"], [[f"[`{name}`](#{name})", r.header["Purpose"]] for name, r in trains.items()])]
    for name, recipe in trains.items():
        out.append(f"### {name}")
        out.append(facts((part.lower(), _linked(_coded(part, text))) for part, text in recipe.header.items()))
    others = [[f"`{name}`", r.header["Purpose"]] for name, r in known.items() if not r.trains]
    out += ["### Files that recipes and launchers need", table(["file", "purpose"], others)]
    return "\n\n".join(out)


def _coded(part: str, text: str) -> str:
    if part != "Launch":
        return text
    commands = re.split(r"\s+(?=posswap |accelerate launch )", text)
    return "<br>".join(f"`{' '.join(command.replace(chr(92), ' ').split())}`" for command in commands)


def _linked(text: str) -> str:
    return re.sub(r"(?<![`(])(https?://[^\s,;)]+[^\s,;).:])", r"<\1>", text)
