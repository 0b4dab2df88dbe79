"""`posswap explain`: from the config alone, what a model has and what a swap would do."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner, Result

from hf_posswap.cli import app
from hf_posswap.schemes import schemes_for
from tests.cli.conftest import Posswap


def explain(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


@pytest.fixture
def config_only(gpt2: Path, tmp_path: Path) -> Path:
    """Return a folder with nothing but GPT-2's config.json."""
    folder = tmp_path / "config-only"
    folder.mkdir()
    shutil.copy(gpt2 / "config.json", folder)
    return folder


def test_every_scheme_in_a_model_that_has_no_weights(posswap: Posswap, config_only: Path) -> None:
    run = posswap("explain", config_only, "--json")
    found = json.loads(run.stdout)
    assert (run.returncode, run.stderr) == (0, "")
    assert found["model"]["native"] == "learned table, 16 positions"
    assert set(found["schemes"]) == set(schemes_for("text"))
    assert (found["schemes"]["rope"], found["schemes"]["sinusoidal"]) == ("plugin", "native")
    assert (found["plan"], found["refusal"]) == (None, None)
    assert [path.name for path in config_only.iterdir()] == ["config.json"]


def test_a_plan_with_its_settings(llama: Path) -> None:
    result = explain(llama, "yarn:factor=4,beta_fast=16", "--json")
    plan = json.loads(result.stdout)["plan"]
    assert result.exit_code == 0
    assert plan["route"] == "native"
    assert plan["max_length"] == 4 * 32
    assert (plan["scheme"]["factor"], plan["scheme"]["beta_fast"]) == (4.0, 16.0)


def test_site_and_length_reach_the_plan(llama: Path) -> None:
    plan = json.loads(explain(llama, "rope", "--max-length", "96", "--site", "attention", "--json").stdout)["plan"]
    assert (plan["route"], plan["max_length"]) == ("plugin", 96)


def test_lists_are_given_with_commas(llama: Path) -> None:
    result = explain(llama, "longrope:long_factor=1,2,3,4.5,factor=2", "--json")
    assert json.loads(result.stdout)["plan"]["scheme"]["long_factor"] == [1.0, 2.0, 3.0, 4.5]


def test_for_people_nothing_is_cut_at_80_columns(posswap: Posswap, llama: Path) -> None:
    run = posswap("explain", llama, "yarn:factor=4")
    assert (run.returncode, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) <= 80
    edits = [line[50:].strip() for line in run.stdout.splitlines() if line[:1] in "c " and len(line) > 50]
    assert "original_max_position_embeddings=32" in "".join(edits)


def test_a_refused_swap_says_why_and_what_works(posswap: Posswap, bert: Path) -> None:
    run = posswap("explain", bert, "nope")
    assert run.returncode == 3
    assert "refused: nope needs a causal model" in run.stdout
    assert "What works:" in run.stdout
    assert run.stderr == ""
    as_json = explain(bert, "nope", "--json")
    assert as_json.exit_code == 3
    assert json.loads(as_json.stdout)["refusal"].startswith("nope needs a causal model")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["yrn"], "unknown scheme 'yrn'. Did you mean 'yarn'?"),
        (["yarn"], "yarn: give factor or max_length"),
        (["yarn:factor"], "yarn:factor: 'factor' is not FIELD=VALUE, such as yarn:factor=4,base=500000."),
        (["yarn:factor=abc"], "yarn:factor=abc: factor of 'yarn' must be a number or none, got 'abc'."),
        (["yarn:factr=4"], "scheme 'yarn' has no field 'factr'. Did you mean 'factor'?"),
        (["yarn:max_length=64"], "Give it as an option: max_length=..., on the command line --max-length."),
        (["yarn:factor=2,factor=4"], "yarn:factor=2,factor=4: factor is written twice"),
        (["yarn:factor=0.5"], "yarn: factor must be a finite number >= 1"),
        (["yarn:truncate=1"], "truncate of 'yarn' must be true or false, got '1'."),
        (["rope:layout=quarter"], "layout of 'rope' must be half or interleaved or none, got 'quarter'."),
        (["rope", "--max-length", "0"], "max_length must be a whole number of tokens >= 1, got 0."),
        (["rope:base=x"], "rope:base=x: base of 'rope' must be a number or none, got 'x'."),
        (["yarn:factor=4:truncate=true"], "; write yarn:factor=4,truncate=true"),
        (["yrn:factor=4"], "unknown scheme 'yrn'. Did you mean 'yarn'?"),
        (["--max-length", "64"], "name one after MODEL"),
        (["--site", "attention"], "name one after MODEL"),
    ],
)
def test_a_wrong_command_line_is_one_line(llama: Path, arguments: list[str], line: str) -> None:
    result = explain(llama, *arguments)
    assert result.exit_code == 2
    assert line in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_what_typer_refuses_is_a_usage_error_too(llama: Path) -> None:
    result = explain(llama, "rope", "--max-length", "many")
    assert result.exit_code == 2
    assert "--max-length" in result.stderr


@pytest.mark.parametrize("config", ["{broken", "[1, 2]", "{}", '{"model_type": "no-such-type"}', ""])
def test_a_bad_config_is_one_line(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    result = explain(tmp_path)
    assert result.exit_code == 4
    assert result.stderr.startswith(f"error: {str(tmp_path)!r} holds no readable model config")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["explain", "patch", "doctor"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"n_head": 0}, "no model can be built from this GPT2Config"),
        ({"n_head": -1}, "a model has a num_heads of at least 1, and by its config this one's is -1"),
        ({"n_head": 3}, "`embed_dim` must be divisible by num_heads"),
        ({"n_head": "two"}, "holds no readable model config (config.json)"),
        ({"n_positions": -4}, "no model can be built from this GPT2Config (architectures ['GPT2LMHeadModel'])"),
        ({"n_embd": 0}, "no model can be built"),
        ({"activation_function": "none"}, "no model can be built"),
        ({"architectures": ["BertModel"]}, "no model can be built from this GPT2Config (architectures ['BertModel'])"),
        # Refused by us, or by GPT2Config in earlier releases of transformers.
        ({"architectures": [None]}, "[None]"),
        ({"architectures": 5}, "architectures"),
    ],
)
def test_an_impossible_config_is_said_to_be_one(
    gpt2: Path, tmp_path: Path, command: str, change: dict[str, object], line: str
) -> None:
    shutil.copytree(gpt2, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    arguments = [
        command,
        str(tmp_path / "model"),
        *(["rope", "-o", str(tmp_path / "out")] if command == "patch" else []),
    ]
    result = CliRunner().invoke(app, arguments)
    assert "unexpected" not in result.stderr
    if command != "doctor":  # which goes on with what can be read
        assert result.exit_code in (3, 4)
        assert line in result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["Trainer", "GPT2Config", "AutoModel", "__class__", "NoSuchClass"])
def test_architectures_that_name_no_model_are_passed_over(gpt2: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(gpt2, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [name]}))
    found = json.loads(explain(tmp_path / "model", "--json").stdout)
    assert found["model"]["model"] == "GPT2LMHeadModel"


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder", "a/b/c", "~/no/such/folder", ""])
def test_a_bad_path_is_one_line(name: str) -> None:
    result = explain(name)
    assert result.exit_code == 4
    assert result.stderr == f"error: {name!r} does not exist; give a folder that holds a config.json, or a Hub id.\n"


def test_a_file_is_no_model(gpt2: Path) -> None:
    result = explain(gpt2 / "config.json")
    assert result.exit_code == 4
    assert "is a file" in result.stderr


@pytest.mark.slow
def test_an_unknown_hub_id_offline(posswap: Posswap) -> None:
    run = posswap("explain", "no-such-owner/no-such-model", HF_HUB_OFFLINE="1")
    assert run.returncode == 4
    assert run.stderr.startswith("error: 'no-such-owner/no-such-model' holds no readable model config")
    assert run.stderr.count("\n") == 1


def test_a_model_that_no_family_describes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    result = explain(tmp_path)
    assert result.exit_code == 3
    assert "model type 'mamba' is not supported: its layers are recurrent" in result.stderr


@pytest.mark.slow
def test_a_plan_costs_little_more_than_the_imports_of_plain_transformers(llama: Path) -> None:
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def cpu_seconds(*arguments: str | Path) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], env=compiled, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    commands = {
        "plan": ("-m", "hf_posswap", "explain", llama, "alibi"),
        "imports": ("-c", "import torch; from transformers import LlamaForCausalLM"),
        "help": ("-m", "hf_posswap", "--help"),
    }
    for arguments in commands.values():
        cpu_seconds(*arguments)  # compiles what is imported
    rounds: list[dict[str, float]] = []
    # Other programs make any run a third slower: only neighbours are compared, and the middle ratio decides.
    while len(rounds) < 11:
        order = list(commands) if len(rounds) % 2 else list(reversed(commands))
        rounds.append({name: cpu_seconds(*commands[name]) for name in order})
        plans = median(seconds["plan"] / seconds["imports"] for seconds in rounds)
        helps = median(seconds["help"] / seconds["imports"] for seconds in rounds)
        if len(rounds) >= 3 and plans <= 1.15 and helps <= 0.1:
            return
    assert plans <= 1.15, rounds
    assert helps <= 0.1, rounds
