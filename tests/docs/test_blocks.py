"""Every block of the pages is run, or says why not; examples print what they show."""

from __future__ import annotations

import contextlib
import io
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_posswap import load_recipe
from tests.docs.pages import PAGES, PRINTS, README, ROOT, Block, blocks, blocks_of, text_of
from tests.docs.place import environment, furnish

SLOW = {"slow", "slow shown"}
RUN_HERE = {"", "example", "shown", "needs", *SLOW}
RUN_ELSEWHERE = {"loop", "path", "command", "file"}
"""test_loops.py, test_path.py, .ci/run; what shows a file is run as that file."""
CODE = {"python", "bash"}
MINUTES = {".docs/pages/recipes.md"}
SPOKEN = {*CODE, "text", "yaml", "diff"}


def chosen(page: str, *, slow: bool) -> list[Block]:
    """Return the blocks of `page` that are run here, with those that take long or without them."""
    kinds = RUN_HERE if slow else RUN_HERE - SLOW
    return [block for block in blocks_of(page) if block.language in CODE and block.kind in kinds]


def run(block: Block, names: dict[str, Any], folder: Path) -> str:
    """Return what the block prints: Python in this process, with `names`; a command in a shell, in `folder`."""
    if block.language == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.code, str(block), "exec"), names)
        return printed.getvalue()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=folder, env=environment(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block}: {done.stderr[-3000:]}"
    return done.stdout


def lines_of(printed: str) -> list[str]:
    """Return the lines of an output without the spaces at their ends."""
    return [line.rstrip() for line in printed.rstrip().splitlines()]


def run_all(some: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks in order; they share one folder and one namespace, as a reader's session does."""
    furnish(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(folder / "cache"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in some:
        if block.kind == "needs" and find_spec(block.detail) is None:
            pytest.skip(f"{block.detail} is not installed: {block} is not tested")
        printed = run(block, names, folder)
        if PRINTS.search(block.kind):
            assert lines_of(printed) == lines_of(block.shown), block


def pages_to_run() -> list[Any]:
    """Return the pages with blocks to run as parameters; one whose blocks take minutes together is slow."""
    pages = [page for page in PAGES if chosen(page, slow=False)]
    return [pytest.param(page, marks=pytest.mark.slow if page in MINUTES else ()) for page in pages]


@pytest.mark.parametrize("page", pages_to_run())
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all(chosen(page, slow=False), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.kind in SLOW for b in chosen(p, slow=True))])
def test_all_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all(chosen(page, slow=True), tmp_path, monkeypatch)


def test_every_block_has_a_test_or_a_reason() -> None:
    every = [block for page in PAGES for block in blocks_of(page)]
    assert [str(block) for block in every if block.language not in SPOKEN] == []
    code = [block for block in every if block.language in CODE]
    assert [f"{b}: {b.kind}" for b in code if b.kind not in RUN_HERE | RUN_ELSEWHERE | {"not run"}] == []
    assert [str(block) for block in code if block.kind == "not run" and len(block.detail) < 15] == []


def test_examples_show_what_they_print() -> None:
    shown = blocks("example")
    assert {block.page for block in shown} >= {README}
    assert [str(block) for block in shown if block.language != "python" or not block.shown] == []
    assert len(shown) == sum(text_of(page).count("<!-- example -->") for page in PAGES)
    assert len(shown) == sum(text_of(page).count("<!-- /example -->") for page in PAGES)


def test_shown_commands_have_their_output_below() -> None:
    shown = [*blocks("shown"), *blocks("slow shown")]
    assert len(shown) >= 3
    assert [str(block) for block in shown if block.language != "bash" or not block.shown] == []


def test_pages_show_files_as_they_are() -> None:
    shown = blocks("file")
    toys = ("window_toll", "house", "of_functions")
    assert {block.detail for block in shown} >= {f"tests/toys/{name}.py" for name in toys}
    for block in shown:
        assert block.code == (ROOT / block.detail).read_text(encoding="utf-8"), f"{block} shows an old {block.detail}"


def test_commands_of_pages_are_those_of_the_readme() -> None:
    known = {block.detail: block.code for block in blocks_of(README) if block.kind == "command"}
    assert set(known) == {"quickstart", "uses", "test"}
    assert [str(block) for block in blocks("command") if known.get(block.detail) != block.code] == []


def test_shown_recipes_can_be_run(tmp_path: Path) -> None:
    written = [block for page in PAGES for block in blocks_of(page) if block.language == "yaml"]
    of_others = {"plugins", "model_name_or_path"}  # files of axolotl and LLaMA-Factory
    shown = [block for block in written if not of_others & set(yaml.safe_load(block.code))]
    assert shown
    for number, block in enumerate(shown):
        assert isinstance(yaml.safe_load(block.code), dict)
        (tmp_path / f"{number}.yaml").write_text(block.code, encoding="utf-8")
        assert load_recipe(str(tmp_path / f"{number}.yaml")), block


def test_what_is_run_would_fail(tmp_path: Path) -> None:
    page = "\n".join(
        ["<!-- example -->", "```python", "print(1)", "```", "", "```text", "2", "```", "<!-- /example -->",
         "<!-- not run: it needs the moon -->", "```bash", "fly", "```", "", "```python", "1 / 0", "```", ""]
    )  # fmt: skip
    example, shown, flight, division = blocks_of("page", page)
    assert (example.shown, shown.language, example.kind) == ("2\n", "text", "example")
    assert (flight.kind, flight.detail, flight.line) == ("not run", "it needs the moon", 11)
    with pytest.raises(ZeroDivisionError):
        run(division, {}, tmp_path)
    with pytest.raises(AssertionError, match="page:11"):
        run(flight, {}, tmp_path)
