"""Fields of a scheme that a command line gives apart from it: the answer is the right way, in every command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_posswap.cli import app
from hf_posswap.schemes import Yarn, make_scheme

COMMANDS = {
    "explain": ["explain", "MODEL"],
    "patch": ["patch", "MODEL", "-o", "OUT"],
    "eval": ["eval", "MODEL"],
    "lm-eval": ["lm-eval", "MODEL", "--tasks", "none.yaml"],
    "compare": ["compare", "MODEL"],
}
WAYS = {
    "options": ["yarn", "--factor", "4", "--beta-fast", "16"],
    "options with =": ["yarn", "--factor=4", "--beta_fast=16"],
    "words": ["yarn", "factor=4", "beta_fast=16"],
    "--set": ["yarn", "--set", "factor=4", "--set", "beta_fast=16"],
    "one behind the scheme": ["yarn:factor=4", "--beta-fast", "16"],
    "a call": ["yarn(factor=4, beta_fast=16)"],
    "a mapping": ['{"name": "yarn", "factor": 4, "beta_fast": 16}'],
    "colons": ["yarn:factor=4:beta_fast=16"],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", COMMANDS)
def test_other_ways_are_answered_with_the_right_one(llama: Path, tmp_path: Path, command: str, way: str) -> None:
    places = {"MODEL": str(llama), "OUT": str(tmp_path / "out")}
    scheme, *more = WAYS[way]
    plus = "+" if command == "compare" else ""
    done = CliRunner().invoke(app, [*(places.get(part, part) for part in COMMANDS[command]), plus + scheme, *more])
    assert done.exit_code == 2, done.output
    assert done.stderr.count("\n") == 1
    right = re.search(r"; write \+?(yarn:\S+)\n$", done.stderr)
    assert right is not None, done.stderr
    assert make_scheme(right[1]) == Yarn(factor=4.0, beta_fast=16.0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme", ["yarn", "yarn:factor=4"])
def test_compare_takes_a_scheme_with_its_sign_alone(llama: Path, scheme: str) -> None:
    done = CliRunner().invoke(app, ["compare", str(llama), scheme])
    assert done.exit_code == 2
    assert done.stderr == f"error: '{scheme}' is a scheme, and no model: write +{scheme} to put it in.\n"


@pytest.mark.parametrize(("command", "right"), [("explain", "MODEL yarn"), ("compare", "MODEL+yarn")])
def test_a_scheme_is_no_option(llama: Path, command: str, right: str) -> None:
    done = CliRunner().invoke(app, [command, str(llama), "--scheme", "yarn"])
    assert done.exit_code == 2
    assert done.stderr.endswith(f"--scheme yarn: a scheme is given behind the model, without an option: {right}\n")


def test_what_is_no_field_is_typers_to_say(llama: Path) -> None:
    done = CliRunner().invoke(app, ["explain", str(llama), "yarn", "--colour", "red"])
    assert done.exit_code == 2
    assert "No such option: --colour" in " ".join(done.stderr.split())
