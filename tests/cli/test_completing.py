"""The shell completes names of schemes, recipes and families, as the shell itself asks for them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hf_posswap.cli import app
from hf_posswap.families import FAMILIES
from hf_posswap.schemes import SCHEMES
from hf_posswap.training.config.shipped import shipped_recipes
from tests.cli.conftest import ROOT

RECIPES = shipped_recipes()


def completed(*words: str) -> list[str]:
    """Return what bash is offered behind `posswap` and `words`, of which the last is begun."""
    asked = {"_POSSWAP_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["posswap", *words])}
    done = CliRunner().invoke(app, [], prog_name="posswap", env=asked | {"COMP_CWORD": str(len(words))})
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["schemes", "ya"], [name for name in SCHEMES if name.startswith("ya")]),
        (["explain", "model", "r"], [name for name in SCHEMES if name.startswith("r")]),
        (["patch", "model", "self"], ["self_extend"]),
        (["eval", "model", "ker"], ["kerple"]),
        (["lm-eval", "model", "ker"], ["kerple"]),
        (["compare", "model", "+ker"], ["+kerple"]),
        (["compare", "model+ker"], ["model+kerple"]),
        (["recipes", "l"], [name for name in RECIPES if name.startswith("l")]),
        (["recipes", "accelerate/d"], [name for name in RECIPES if name.startswith("accelerate/d")]),
        (["train", "to-"], ["to-alibi"]),
        (["train", "bas"], []),  # it is no training by itself
        (["families", "gpt"], [name for name in FAMILIES if name.startswith("gpt")]),
        (["sch"], ["schemes"]),
    ],
)
def test_names_that_begin_so_are_offered(words: list[str], offered: list[str]) -> None:
    assert completed(*words) == offered


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_shells_script_asks_this_command() -> None:
    """Whoever runs the tests, a bash asks: which shell it is for, is seen by the parents of the process."""
    command = ["bash", "-c", '"$0" -m hf_posswap --show-completion; exit $?', sys.executable]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "--install-completion" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert "complete -o default -F _posswap_completion posswap" in shown.stdout, shown.stderr
