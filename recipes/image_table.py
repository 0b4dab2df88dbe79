"""Prints the table of vision models: their classes, and the route of each scheme in them.

    python recipes/image_table.py

The routes come from plans on models without weights; tests/families/test_vision.py checks these plans.
"""

from __future__ import annotations

from collections import defaultdict

import typer

from hf_posswap.patching.inspect.census import census, image_classes
from hf_posswap.schemes import schemes_for


def table() -> str:
    """Return the table as Markdown: one line per group of classes with equal routes."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for entry in census(image_classes()):
        alike[tuple(entry.routes.values())].append(f"`{entry.name}`")
    schemes = schemes_for("images")
    lines = [["classes", *(f"`{scheme}`" for scheme in schemes)], ["---"] * (1 + len(schemes))]
    lines += [[", ".join(names), *routes] for routes, names in alike.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the table of vision models."""
    typer.echo(table())


if __name__ == "__main__":
    typer.run(main)
