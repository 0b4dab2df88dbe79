"""What came from users and files steers no terminal: in errors, warnings, tables, JSON, progress, reports and pages."""

from __future__ import annotations

import io
import json
import sys
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.checkpoints.doctor_findings import Diagnosis, Finding
from hf_posswap.cli import output
from hf_posswap.cli.app import app
from hf_posswap.comparison.report.markup import tag
from hf_posswap.comparison.tables import latex, markdown
from hf_posswap.errors import CheckpointError, PluginWarning, UnknownNameError
from hf_posswap.utils.format import markdown_text
from hf_posswap.utils.html_tables import table
from hf_posswap.utils.printable import UNSAFE, brief_repr, printable, printable_lines
from hf_posswap.utils.progress import Reporter

BAD = "a\x1b[31mb\x9b2Jc\x07d\u202ee\u2066f\u2028g\x7fh"
"""Colours, clearing of the screen, a bell, text from right to left, a line's end of Unicode, a deletion."""


def is_harmless(text: str) -> bool:
    return not any(
        unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") and one not in "\n\t"
        or unicodedata.bidirectional(one) in ("RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI")
        for one in text
    )  # fmt: skip


@pytest.mark.slow
def test_every_character_that_steers_is_escaped_and_no_other() -> None:
    for one in map(chr, range(sys.maxunicode + 1)):
        assert is_harmless(printable_lines(one))
        if UNSAFE.match(one) is None:
            assert printable_lines(one) == one
        else:
            assert printable_lines(one) == ascii(one)[1:-1]
    assert (
        printable_lines("naïve café, \u05e9\u05dc\u05d5\u05dd\r\nnext") == "naïve café, \u05e9\u05dc\u05d5\u05dd\nnext"
    )
    assert printable("a\r\n  b") == "a b"
    assert is_harmless(brief_repr(BAD))
    assert len(brief_repr("a" * 10**5)) < 250


def test_errors_and_warnings_are_one_harmless_line() -> None:
    for error in (CheckpointError(f"cannot read {BAD}\nerror: done"), UnknownNameError("scheme", BAD, ["rope"])):
        assert is_harmless(str(error))
        assert "\n" not in str(error)
    with pytest.warns(PluginWarning) as told:
        warnings.warn(BAD, PluginWarning, stacklevel=1)
    assert is_harmless(str(told[0].message))


def test_what_commands_print_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_text(BAD)
    output.show_lines(BAD)
    output.show_indented(BAD, 2)
    output.show_pairs([(BAD, BAD)])
    output.show_table(["name", BAD], [[BAD, BAD]])
    output.show_command(f"posswap patch '{BAD}'")
    assert is_harmless(capsys.readouterr().out)
    output.show_json({BAD: [BAD]})
    text = capsys.readouterr().out
    assert is_harmless(text)
    assert json.loads(text) == {BAD: [BAD]}


def test_lines_and_bars_of_progress_are_harmless() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        reporter = Reporter(Console(file=out, force_terminal=terminal, color_system=None, width=200))
        reporter.line(f"one\n{BAD}")
        with reporter.task(f"x\n{BAD}", 2) as task:
            task.advance(1)
        plain = out.getvalue()
        assert "\\x9b2Jc\\x07d\\u202ee" in plain
        assert not any(one in plain for one in ("\x1b[31m", "\x9b", "\x07", "\u202e", "\u2066"))


@pytest.mark.slow
def test_a_folder_with_such_a_name_is_read_and_shown_without_harm(tmp_path: Path) -> None:
    folder = tmp_path / f"{BAD}\nerror: done"
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).save_pretrained(folder)
    out = tmp_path / "swapped"
    run = CliRunner()
    commands: list[list[str]] = [
        ["explain", str(folder)],
        ["explain", str(folder), "rope"],
        ["doctor", str(folder)],
        ["doctor", str(folder), "--json"],
        ["patch", str(folder), "rope", "-o", str(out), "--no-tokenizer"],
        ["patch", str(folder), "rope", "-o", str(folder)],
        ["export", str(folder), "--target", "vllm"],
        ["export", str(folder), "--target", BAD],
        ["report", str(folder)],
        ["push", str(folder), "me/it", "--dry-run"],
        ["train", str(folder / "none.yaml")],
        ["train", f"out={BAD}"],
        ["explain", f"./{BAD}"],
        ["explain", str(folder), BAD],
        ["explain", str(folder), f"{BAD}.json"],
        ["recipes", BAD],
    ]
    for command in commands:
        done = run.invoke(app, command)
        assert is_harmless(done.output), command
        assert is_harmless(done.stderr), command
        assert not any(line.startswith("error: done") for line in done.output.splitlines()), command
    assert is_harmless(str(hf_posswap.doctor(folder)))


def test_reports_tables_and_pages_are_harmless() -> None:
    diagnosis = Diagnosis(BAD, BAD, (Finding("note", BAD, f"{BAD}\nerror: x", BAD),), (BAD,))
    assert is_harmless(str(diagnosis))
    assert "\nerror" not in str(diagnosis)
    row = {"length": 8, "perplexity": 2.0, "low": 1.9, "high": 2.1}
    model: dict[str, Any] = {"ppl_prefix": [row], "cannot_run": {"16": f"no | {BAD}"}, "not_measured": {}, "plan": None}
    results = {
        "models": {f"{BAD}\n|x": model}, "lengths": [8, 16], "window": 8, "comparisons": {}, "notes": [BAD],
        "data": {"documents": 9, "source": BAD}, "base": BAD,
    }  # fmt: skip
    said = markdown(results)
    assert is_harmless(said)
    (line,) = [line for line in said.splitlines() if line.startswith("| ●")]
    assert line.count("|") - line.count("\\|") == 4
    assert is_harmless(latex(results))
    assert latex(results).count("\n") == 8
    for text in (str(tag("p", BAD, title=BAD)), table([[BAD, BAD]], [BAD]), markdown_text(BAD)):
        assert is_harmless(text)
