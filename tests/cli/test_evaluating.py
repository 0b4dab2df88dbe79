"""`posswap eval` and `posswap compare`, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.cli.comparing import parse_candidates
from hf_posswap.errors import OptionError
from hf_posswap.training import byte_tokenizer
from tests.cli.conftest import ROOT, Posswap


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a byte-level GPT-2 of 16 positions; a file with two documents lies beside it."""
    torch.manual_seed(0)
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = GPT2Config(vocab_size=257, **shape, bos_token_id=256, eos_token_id=256)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    hf_posswap.save(GPT2LMHeadModel(config), folder, tokenizer=byte_tokenizer())
    lines = [json.dumps({"body": f"text {number} " * 9}) for number in range(2)]
    (folder.parent / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
def test_eval_prints_a_table_and_goes_on_where_it_stopped(posswap: Posswap, tiny: Path) -> None:
    arguments = ("eval", tiny, "rope", "--text", tiny.parent / "texts.jsonl", "--column", "body", "--lengths", "16,32")
    out = tiny.parent / "out"
    first = posswap(*arguments, "-o", out)
    assert first.returncode == 0, first.stderr
    assert "| model | 16 (1x) | 32 (2x) |" in first.stdout
    assert "| ● base | " in first.stdout
    assert "base: passkey is not measured: the shortest passkey prompt takes" in first.stderr
    units = (out / "per_doc.jsonl").read_bytes()
    again = posswap(*arguments, "-o", out, "--json")
    assert json.loads(again.stdout) == json.loads((out / "results.json").read_text())
    assert (out / "per_doc.jsonl").read_bytes() == units


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--text", "absent.txt"], 4, "absent.txt does not exist; give text files"),
        (["--lengths", "a"], 2, "--lengths are whole numbers with commas"),
        (["--metrics", "ppl"], 2, "unknown metric 'ppl'"),
        (["--lengths", "64"], 3, "no model can run [64] tokens. Limits: tiny at 16."),
        (["--dtype", "float31"], 2, "--dtype float31: expected a precision of torch"),
        (["--max-length", "3"], 2, "name one after MODEL"),
        (["--margin", "nan"], 2, "margin is a number of nats per token, at least 0, got nan."),
        (["--margin", "inf"], 2, "margin is a number of nats per token, at least 0, got inf."),
        (["--margin", "-1"], 2, "margin is a number of nats per token, at least 0, got -1.0."),
        (["rope:base=x"], 2, "rope:base=x: base of 'rope' must be a number or none, got 'x'."),
    ],
)
def test_what_is_wrong_is_one_line(tiny: Path, arguments: list[str], code: int, message: str) -> None:
    text = [] if "--text" in arguments else ["--text", "python"]
    done = CliRunner().invoke(app, ["eval", str(tiny), *text, *arguments])
    assert done.exit_code == code, done.stderr
    assert message in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
def test_ctrl_c_says_what_is_kept_and_how_to_resume(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"body": f"text {i} " * 99}) + "\n" for i in range(2)))
    text = ("--text", tmp_path / "texts.jsonl", "--column", "body", "--lengths", "16,512")
    many = ("--trials", "2000", "--metrics", "ppl_prefix,passkey")
    out, heard = tmp_path / "out", tmp_path / "stderr"
    lines = out / "per_doc.jsonl"

    def interrupted(command: list[Any], when: Callable[[], bool]) -> str:
        with subprocess.Popen(
            [sys.executable, "-m", "hf_posswap", *map(str, command)], env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True, start_new_session=True, stdout=subprocess.DEVNULL, stderr=heard.open("w"),
        ) as process:  # fmt: skip
            deadline = time.monotonic() + 120
            while not when() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130, heard.read_text()
        return " ".join(heard.read_text().split())

    command = ["eval", tiny, "rope", *text, *many, "-o", out]
    told = interrupted(command, lambda: lines.is_file() and lines.stat().st_size > 0)
    found = re.search(r"Interrupted\. (\d+) finished units are kept in (\S+): the same command resumes", told)
    assert found is not None, told
    assert (int(found[1]), found[2]) == (lines.read_bytes().count(b"\n"), str(out))
    heard.unlink()
    told = interrupted(["compare", tiny, "+rope", *text, *many], lambda: "not measured" in heard.read_text())
    assert "Interrupted: nothing is kept, because --out DIR was not given" in told


def test_compare_puts_schemes_into_one_model(posswap: Posswap, tiny: Path) -> None:
    text = ("--text", tiny.parent / "texts.jsonl", "--column", "body")
    done = posswap(
        "compare", tiny, "+rope:base=500", "+alibi", *text, "--lengths", "16,32", "--metrics", "ppl_prefix", "--json"
    )
    assert done.returncode == 0, done.stderr
    models = json.loads(done.stdout)["models"]
    assert list(models) == ["tiny", "tiny+rope:base=500", "tiny+alibi"]
    assert models["tiny+rope:base=500"]["plan"]["scheme"]["base"] == 500.0


def test_candidates_are_read_from_words(tmp_path: Path) -> None:
    (tmp_path / "a+b").mkdir()
    names = [
        c.label
        for c in parse_candidates([str(tmp_path / "a+b"), "org/x", "+rope", "org/x+yarn:factor=4,beta_fast=16"], 64)
    ]
    assert names == ["a+b", "x", "a+b+rope", "x+yarn:factor=4,beta_fast=16"]
    with pytest.raises(OptionError, match="puts a scheme into the first model, and none is before it"):
        parse_candidates(["+rope"], None)
    with pytest.raises(OptionError, match="scheme 'yarn' has no field 'factr'"):
        parse_candidates(["org/x+yarn:factr=4"], None)
