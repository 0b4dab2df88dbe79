"""`posswap advise`: what to use, for people and as JSON."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.cli.output import show_command
from hf_posswap.inspection.advice.advise import why_not
from tests.cli.conftest import Posswap, says


def advise(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["advise", *map(str, arguments)])


def test_json_is_the_advice(gpt2: Path) -> None:
    run = advise(gpt2, "--max-length", "128", "--budget", "1e7", "--target", "vllm", "--json")
    assert run.exit_code == 0
    assert json.loads(run.stdout) == hf_posswap.advise(gpt2, 128, budget=1e7, serve="vllm").to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 120])
def test_for_people_everything_is_said_at_every_width(posswap: Posswap, gpt2: Path, width: int) -> None:
    run = posswap("advise", gpt2, "--length", "128", "--budget", "1e7", COLUMNS=str(width))
    assert (run.returncode, run.stderr) == (0, "")
    longest = max(map(len, run.stdout.split()))  # a word, such as a path, is not torn
    assert max(map(len, run.stdout.splitlines())) <= max(width, longest + 6)
    advice = hf_posswap.advise(gpt2, 128, budget=1e7)
    for reason in advice.use.reasons:
        assert says(run.stdout, f"{reason.trained}, {reason.where} [{reason.source}]")
        assert says(run.stdout, reason.finding)
    assert all(says(run.stdout, said) for said in (advice.use.title, *advice.use.unknown))
    for option in advice.others:
        assert says(run.stdout, " ".join([option.title, *why_not(option)]))


@pytest.mark.parametrize("width", [20, 60, 120])
def test_a_command_is_a_command_at_every_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["printf", "%s\\n", "data.sources=[{path: books/}]", "--flag", "-o", "it's", "--length", "8,16", "x" * 30]
    show_command(shlex.join(words))
    typed = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == words[2:]  # as a shell reads it
    assert all("--length 8,16" in line or "8,16" not in line for line in typed.splitlines())


@pytest.mark.slow
def test_the_name_of_a_class_is_enough(posswap: Posswap) -> None:
    run = posswap("advise", "LlamaForCausalLM", "--length", "8192")
    assert run.returncode == 0
    assert "LlamaForCausalLM" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--length", "1"), 2, "length is a whole number"),
        (("--length", "128", "--budget", "many"), 2, "--budget many: give a number of tokens, such as 1e8."),
        ((), 2, "Missing option '--max-length'"),
    ],
)
def test_what_is_wrong_is_one_line(
    posswap: Posswap, gpt2: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    run = posswap("advise", gpt2, *arguments)
    assert run.returncode == code
    assert words in run.stderr


def test_a_folder_that_is_not_there_is_a_matter_of_files(posswap: Posswap) -> None:
    run = posswap("advise", "./nowhere", "--length", "128")
    assert run.returncode == 4


def test_a_misspelt_class_is_told_the_near_ones() -> None:
    run = advise("LamaForCausalLM", "--max-length", "4096")
    assert run.exit_code == 4
    assert "has no class of that name. Did you mean LlamaForCausalLM" in run.stderr
    assert "huggingface" not in run.stderr
    run = advise("Nothing", "--max-length", "4096")
    assert "the Hub was not asked, because HF_HUB_OFFLINE is set. Correct the name" in run.stderr
