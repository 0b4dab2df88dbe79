"""The tutorial and the notebooks: a script in percent format becomes a notebook, is run, and becomes a page."""

from __future__ import annotations

import base64
import copy
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from repository import PAGE_OF, ROOT, address, led_out

FOLDER = ".docs/tutorial"
SCRIPTS = tuple(source for source in PAGE_OF if source.startswith(f"{FOLDER}/"))
"""The scripts, from the root of the repository; `repository.PAGE_OF` has their pages."""
_QUIET = "ignore:IProgress not found"
"""A warning of tqdm where ipywidgets is missing, with a path of the machine: nothing here draws a bar."""
_TIME = 600
"""Seconds for a cell: the machine may be busy."""


@dataclass(frozen=True)
class Tutorial:
    """A script as it was run.

    Attributes:
        place: of its page in the site.
        page: Markdown, with what each cell printed.
        pictures: by their places in the site, PNG.
        notebook_place: of the notebook in the site.
        notebook: JSON, with its outputs.
    """

    place: str
    page: str
    pictures: dict[str, bytes]
    notebook_place: str
    notebook: str


def read_notebook(script: str) -> Any:
    """Return the script as a notebook that was not run yet."""
    import jupytext

    return jupytext.read(ROOT / script)


def run(script: str, folder: Path) -> Any:
    """Return the notebook with its outputs; one that was run since the last change of the code is found in `folder`.

    Raises:
        nbclient.exceptions.CellExecutionError: a claim is false.
    """
    import nbformat
    from nbclient import NotebookClient

    kept = folder / f"{Path(script).stem}.ipynb"
    code = max(path.stat().st_mtime for path in [*(ROOT / "hf_posswap").rglob("*.py"), ROOT / script])
    if kept.exists() and kept.stat().st_mtime > code:
        return nbformat.read(kept, as_version=4)
    notebook = read_notebook(script)
    where = {"metadata": {"path": str(ROOT)}}
    client = NotebookClient(notebook, timeout=_TIME, kernel_name="python3", resources=where, coalesce_streams=True)
    client.execute(env=os.environ | {"PYTHONWARNINGS": _QUIET})
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, kept)
    return notebook


@cache
def made(script: str, folder: Path) -> Tutorial:
    """Return the script, run."""
    import nbformat

    notebook = run(script, folder)
    name = Path(script).stem
    blocks, pictures = [], {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            blocks.append(cell.source)
            continue
        blocks.append(f"```python\n{cell.source}\n```")
        blocks += [*_printed(cell), *_tables(cell)]
        for data in _images(cell):
            target = f"pictures/tutorial/{name}-{number}.png"
            pictures[target] = base64.b64decode(data)
            blocks.append(f"![{_title(cell.source)}]({target})")
    head, first, rest = "\n\n".join(blocks).partition("\n\n```python")
    target, notebook_place = PAGE_OF[script], f"tutorial/{name}.ipynb"
    lead = f"{head}\n\n[The notebook]({notebook_place}), with all outputs; it is made from `{script}` and run whenever "
    page = f"{lead}this site is built.{first}{rest}"
    return Tutorial(target, page, pictures, notebook_place, nbformat.writes(_for_download(notebook, script)))


def _for_download(notebook: Any, script: str) -> Any:
    """Return a copy of a notebook whose links do not depend on the folder that it is opened in."""
    alone, repository = copy.deepcopy(notebook), address()
    for cell in alone.cells:
        if cell.cell_type == "markdown":
            cell.source = led_out(cell.source, script, repository)
    return alone


def _printed(cell: Any) -> list[str]:
    text = "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")
    return [f"```text\n{text.rstrip()}\n```"] if text.strip() else []


def _tables(cell: Any) -> list[str]:
    """Return the HTML that a cell shows of its result, each as one line, which Markdown takes as it is."""
    shown = [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]
    return [" ".join(html.splitlines()) for html in shown]


def _images(cell: Any) -> list[str]:
    return [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]


def _title(source: str) -> str:
    """Return what a picture shows: what its cell calls it, or the file that it is."""
    match = re.search(r'sheet\([^"]*"[^"]*", "([^"]*)"', source)
    return match[1] if match else "what the cell above draws"
