"""The tutorial: a script in percent format becomes a notebook, is run as one, and becomes a page of the site."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from repository import ROOT

SCRIPT = ".docs/tutorial/positions.py"
PLACE = "tutorial.md"
NOTEBOOK = "tutorial/positions.ipynb"
_TIME = 600
"""Seconds for a cell: the machine may be busy."""


@dataclass(frozen=True)
class Tutorial:
    """The tutorial as it was run.

    Attributes:
        page: Markdown, with what each cell printed.
        pictures: by their places in the site, PNG.
        notebook: JSON, with its outputs.
    """

    page: str
    pictures: dict[str, bytes]
    notebook: str


def read_notebook() -> Any:
    """Return the script as a notebook that was not run yet."""
    import jupytext

    return jupytext.read(ROOT / SCRIPT)


def run(folder: Path) -> Any:
    """Return the notebook with its outputs; one that was run since the last change of the code is found in `folder`.

    Raises:
        nbclient.exceptions.CellExecutionError: a claim is false.
    """
    import nbformat
    from nbclient import NotebookClient

    kept = folder / "positions.ipynb"
    code = max(path.stat().st_mtime for path in [*(ROOT / "hf_posswap").rglob("*.py"), ROOT / SCRIPT])
    if kept.exists() and kept.stat().st_mtime > code:
        return nbformat.read(kept, as_version=4)
    notebook = read_notebook()
    NotebookClient(
        notebook, timeout=_TIME, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, kept)
    return notebook


@cache
def made(folder: Path) -> Tutorial:
    """Return the tutorial, run."""
    import nbformat

    notebook = run(folder)
    parts, pictures = [], {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += _printed(cell)
        for data in _images(cell):
            place = f"pictures/tutorial/{number}.png"
            pictures[place] = base64.b64decode(data)
            parts.append(f"![{_title(cell.source)}]({place})")
    head, first, rest = "\n\n".join(parts).partition("\n\n```python")
    lead = f"{head}\n\n[The notebook]({NOTEBOOK}), with all outputs; it is made from `{SCRIPT}` and run whenever this "
    return Tutorial(f"{lead}site is built.{first}{rest}", pictures, nbformat.writes(notebook))


def _printed(cell: Any) -> list[str]:
    said = "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")
    return [f"```text\n{said.rstrip()}\n```"] if said.strip() else []


def _images(cell: Any) -> list[str]:
    return [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]


def _title(source: str) -> str:
    """Return what a picture shows: what its cell calls it, or the file that it is."""
    found = re.search(r'sheet\([^"]*"[^"]*", "([^"]*)"', source)
    return found[1] if found else "what the cell above draws"
