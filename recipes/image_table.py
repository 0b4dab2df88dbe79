"""Print the table of models that see images: their classes, and what each scheme becomes in them.

    python recipes/image_table.py

It is made by planning, on models without weights; what a plan says of them is held to by tests/families/test_vision.py.
"""

from __future__ import annotations

from collections import defaultdict

import typer

from hf_posswap.patching.inspect.census import census, image_classes
from hf_posswap.schemes import schemes_for


def table() -> str:
    """Return the table as Markdown: one line for all classes that fare alike."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for entry in census(image_classes()):
        alike[tuple(entry.routes.values())].append(f"`{entry.name}`")
    schemes = schemes_for("images")
    lines = [["classes", *(f"`{scheme}`" for scheme in schemes)], ["---"] * (1 + len(schemes))]
    lines += [[", ".join(names), *routes] for routes, names in alike.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the table of models that see images."""
    typer.echo(table())


if __name__ == "__main__":
    typer.run(main)
