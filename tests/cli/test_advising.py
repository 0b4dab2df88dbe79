"""`posswap advise`: what to use, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hf_posswap
from hf_posswap.cli import app
from tests.cli.conftest import Posswap, says


def advise(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["advise", *map(str, arguments)])


def test_json_is_the_advice(gpt2: Path) -> None:
    run = advise(gpt2, "--length", "128", "--budget", "1e7", "--serve", "vllm", "--json")
    assert run.exit_code == 0
    assert json.loads(run.stdout) == hf_posswap.advise(gpt2, 128, budget=1e7, serve="vllm").to_dict()


@pytest.mark.slow
def test_for_people_everything_is_said_in_80_columns(posswap: Posswap, gpt2: Path) -> None:
    run = posswap("advise", gpt2, "--length", "128", "--budget", "1e7")
    assert (run.returncode, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) <= 80
    advice = hf_posswap.advise(gpt2, 128, budget=1e7)
    for said in (advice.use.title, *map(str, advice.use.reasons), *advice.use.commands, *advice.use.unknown):
        assert says(run.stdout, said)
    assert all(says(run.stdout, option.title) for option in advice.others)


def test_the_name_of_a_class_is_enough(posswap: Posswap) -> None:
    run = posswap("advise", "LlamaForCausalLM", "--length", "8192")
    assert run.returncode == 0
    assert "LlamaForCausalLM" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--length", "1"), 2, "length is a whole number"),
        (("--length", "128", "--budget", "many"), 2, "--budget many: give a number of tokens, such as 1e8."),
        ((), 2, "--length"),
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
