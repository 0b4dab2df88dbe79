"""The tutorial's claims, a test a section: its cells run in order, and each `assert` in them must hold."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import ROOT, links, text_of

SCRIPT = ".docs/tutorial/positions.py"
TEXT = text_of(SCRIPT)
FIRST = "Tutorial: where does a word stand?"


@dataclass
class Section:
    """A heading and the cells of code below it."""

    title: str
    cells: list[str] = field(default_factory=list)


def sections(text: str = TEXT) -> list[Section]:
    """Return the sections of a script in percent format."""
    found: list[Section] = []
    for cell in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        if cell.startswith(" [markdown]"):
            found += [Section(title) for title in re.findall(r"^# ##? (.+)$", cell, re.MULTILINE)]
        elif found:
            found[-1].cells.append(cell)
    return found


TITLES = [section.title for section in sections() if section.cells]
installed = pytest.mark.skipif(
    find_spec("IPython") is None or find_spec("matplotlib") is None,
    reason="IPython is not installed (extra docs): the tutorial is not run",
)


def run(text: str, last: str | None = None) -> dict[str, Exception | None]:
    """Run the cells of `text` up to the section `last`, and return the error of each section that was begun."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outcome: dict[str, Exception | None] = {}
    generator, learns = torch.random.get_rng_state(), torch.is_grad_enabled()
    try:
        for section in sections(text):
            outcome[section.title] = None
            for number, cell in enumerate(section.cells):
                exec(compile(cell, f"{section.title}, cell {number}", "exec"), names)
            if section.title == last:
                break
    except Exception as error:  # of a claim, or of code
        outcome[section.title] = error
    finally:
        torch.random.set_rng_state(generator)
        torch.set_grad_enabled(learns)
    return outcome


@pytest.fixture(scope="module")
def outcome() -> dict[str, Exception | None]:
    """Return the error of each section that was begun."""
    return run(TEXT)


@installed
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", TITLES)
def test_the_claims_of_a_section_hold(title: str, outcome: dict[str, Exception | None]) -> None:
    assert title in outcome, f"not reached: {outcome}"
    if (error := outcome[title]) is not None:
        raise error


def test_every_section_with_code_claims_something() -> None:
    assert [s.title for s in sections() if s.cells and "assert " not in "".join(s.cells)] == [FIRST]
    assert len(TITLES) > 8


FALSE = {
    "A reader that cannot count": ("attend(first)[2] - ", "attend(first + torch.eye(5, 16))[2] - "),
    "First tries: a number, a fraction, binary digits": ("table[:, 0::2], torch.sin", "table[:, 0::2], torch.cos"),
    "Three gifts of the circle": ("stack([cos, -sin, sin, cos]", "stack([cos, sin, sin, cos]"),
    "What adding does to the product": ("mixed = table @ W @ table.T", "mixed = product"),
    "Relative: write the distance into the score": ("(-8 * (head + 1) / 4)", "(-8 * head / 4)"),
    "Rotary: turn the words themselves": ("one * sin + other * cos)", "one * sin + 1.01 * other * cos)"),
    "Turning where no score is ever written down": ("scores.tril() / below", "scores / below"),
}  # fmt: skip
"""What makes a claim of a section false."""


@installed
@pytest.mark.slow
@pytest.mark.parametrize("title", FALSE)
def test_a_false_claim_stops_it(title: str) -> None:
    true, false = FALSE[title]
    assert TEXT.count(true) == 1
    assert isinstance(run(TEXT.replace(true, false), title)[title], AssertionError)


def test_its_links_lead_somewhere() -> None:
    prose = "\n".join(line.removeprefix("# ") for line in TEXT.splitlines() if line.startswith("# "))
    assert [link for link in links(prose) if not (Path(ROOT / SCRIPT).parent / link).exists()] == []
    assert len(links(prose)) >= 4


NOTEBOOKS = ("swap", "adapt", "compare")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_every_section_claims_something(name: str) -> None:
    jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed (extra docs): no notebook is run")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed (extra docs): no notebook is run")
    pytest.importorskip("IPython", reason="IPython is not installed (extra docs): no notebook is run")
    notebook = jupytext.read(ROOT / f".docs/tutorial/{name}.py")
    where = {"metadata": {"path": str(ROOT)}}
    client.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = text_of(f".docs/tutorial/{name}.py")
    assert [s.title for s in sections(text) if s.cells and "assert " not in "".join(s.cells)] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_links_of_a_notebook_lead_somewhere(name: str) -> None:
    text = text_of(f".docs/tutorial/{name}.py")
    prose = "\n".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    assert [link for link in links(prose) if not (ROOT / ".docs/tutorial" / link).exists()] == []
    assert links(prose)
