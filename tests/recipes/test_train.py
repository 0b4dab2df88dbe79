"""Every recipe that is there, for a few steps, through the real script, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_posswap
from hf_posswap.training.config import Recipe, load_recipe
from hf_posswap.training.config.shipped import find_recipe
from hf_posswap.training.engine.parallel import Launch, launch_of_environment
from tests import forked
from tests.training.engine_runs import write_model, write_texts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "train.py"
HEADER = ("Purpose:", "Swap:", "Source:", "Launch:", "Cost:", "Expected:")
KINDS = {
    "openai-community/gpt2": "gpt2",
    "huggyllama/llama-7b": "llama",
    "meta-llama/Llama-2-7b-hf": "llama",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama",
    "meta-llama/Llama-3.1-8B-Instruct": "llama",
    "HuggingFaceTB/SmolLM-135M": "llama",
    "google-bert/bert-base-uncased": "bert",
    "sentence-transformers/all-MiniLM-L6-v2": "bert",
}
FOUND = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "studies")
LAUNCHERS = [path for path in FOUND if "distributed_type" in yaml.safe_load(path.read_text())]
RECIPES = [path for path in FOUND if path not in LAUNCHERS and path.name != "base.yaml"]
SHARED_CODE = ("abf", "rope-to-abf", "linear", "drope", "to-alibi", "learned-to-sinusoidal", "distill")
"""Recipes that train as others here do, with another scheme or another teacher."""
TRAINED = [
    pytest.param(path, marks=pytest.mark.slow if path.stem in SHARED_CODE else [], id=path.stem) for path in RECIPES
]
NAMES = {
    "abf", "linear", "yarn", "longrope", "pose", "learned-to-rope", "learned-to-sinusoidal", "learned-to-t5",
    "rope-to-abf", "rope-to-yarn", "to-alibi", "drope", "rnope", "staged", "gradual", "distill", "encoder-mlm",
    "embedding", "control",
}  # fmt: skip


def test_every_agreed_recipe_and_launcher_is_there() -> None:
    assert {path.stem for path in RECIPES} >= NAMES
    assert {path.stem for path in LAUNCHERS} == {
        "single-gpu", "ddp", "fsdp2", "fsdp2-cp", "deepspeed-zero3", "deepspeed-ulysses", "cpu",
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tiny models of every kind, texts, and divisors for LongRoPE."""
    folder = tmp_path_factory.mktemp("recipes")
    for kind in set(KINDS.values()):
        write_model(folder / kind, kind)
    write_texts(folder / "texts")
    factors = {"name": "longrope", "factor": 4.0, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    (folder / "longrope.json").write_text(json.dumps(factors))
    return folder


def small(path: Path, place: Path) -> list[str]:
    """Return what makes the recipe at `path` a matter of seconds, and nothing else of it different."""
    files = [f"swap.scheme={place / 'longrope.json'}"] if path.stem == "longrope" else []
    wanted = load_recipe(path, files)
    assert wanted.model.name in KINDS, f"{path.name} starts from a model that has no tiny counterpart here"
    batches = min(2, wanted.training.gradient_accumulation_steps)
    sizes = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": batches}
    more = [
        *files,
        f"model.name={place / KINDS[wanted.model.name]}",
        f"data.sources=[{{path: {place / 'texts'}}}]",
        f"data.cache={place / 'cache'}",
        "data.held_out=0.3",
        "data.length=32",
        *(f"training.{name}={size}" for name, size in sizes.items()),
        "training.warmup_steps=1",
        "training.logging_steps=1",
        f"out={place / path.stem}",
    ]
    if wanted.swap.max_length is not None:
        more.append("swap.max_length=128")
    if wanted.swap.gradual_steps:
        more.append("swap.gradual_steps=2")
    for number in range(len(wanted.stages)):
        more += [f"stages.{number}.{key}={value}" for key, value in _stage(number).items()]
    return more + (["swap.scheme.every=2"] if path.stem == "rnope" else [])


def _stage(number: int) -> dict[str, int]:
    return {"max_steps": 2, "length": 32 * (1 + number), "least_steps": 0, "check_every": 1}


def run_script(*arguments: str) -> int:
    """Run recipes/train.py as a script in a process of its own, and return its exit code."""
    process = forked.start(lambda: forked.run_script(SCRIPT, *arguments))
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("path", TRAINED)
def test_every_recipe_trains_and_saves_a_model(path: Path, place: Path) -> None:
    settings = small(path, place)
    assert run_script("--config", str(path), *settings) == 0
    wanted = load_recipe(path, settings)
    report = json.loads((place / path.stem / "report.json").read_text())
    assert [phase["steps"] for phase in report["phases"]] == _steps(wanted, report)
    _check_model(wanted, hf_posswap.load(place / path.stem / report["saved"]))
    for left in ("log.jsonl", "tensorboard"):
        assert list((place / path.stem).rglob(left))
    assert (place / path.stem / "loss.png").is_file()


def _steps(wanted: Recipe, report: dict[str, Any]) -> list[int]:
    if not wanted.stages:
        return [wanted.training.max_steps]
    return [min(phase["steps"], stage.max_steps) for phase, stage in zip(report["phases"], wanted.stages, strict=True)]


def _check_model(wanted: Recipe, model: Any) -> None:
    record = getattr(model.config, "posswap", None)
    if wanted.swap.scheme is None:
        assert record is None
        return
    assert isinstance(wanted.swap.scheme, dict)
    if record["scheme"]["name"] == "per_layer":  # a fitted bias has numbers of its own in each layer
        assert wanted.swap.fit > 0
        assert {one["name"] for one in record["scheme"]["layers"].values()} == {wanted.swap.scheme["name"]}
        return
    assert record["scheme"]["name"] == wanted.swap.scheme["name"]
    given = {**wanted.swap.scheme, **(wanted.stages[-1].scheme or {} if wanted.stages else {})}
    for field, value in given.items():
        assert record["scheme"][field] == pytest.approx(value) if isinstance(value, float) else True
    assert hf_posswap.verify_swap(model).checks


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_header_says_what_it_is(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert [line[2:].split()[0] for line in lines if line[2:3].strip()] == list(HEADER)
    assert any("https://" in line or "measured here" in line for line in lines)
    launched = re.findall(r"(?:posswap|hf_posswap\.cli) train (?:-c )?(\S+)", "\n".join(lines))
    assert launched
    assert {find_recipe(given) if Path(given).suffix == "" else ROOT / given for given in launched} == {path}
    assert "base.yaml" in path.read_text() or any(f"include: {other.name}" in path.read_text() for other in RECIPES)


def test_the_base_by_itself_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_script("--config", str(ROOT / "recipes" / "base.yaml")) == 2
    assert "base.yaml has 1 problem: (1) model.name: give a folder or a Hub id." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("single-gpu", Launch()),
        ("cpu", Launch()),
        ("ddp", Launch(8)),
        ("fsdp2", Launch(8, fsdp=2)),
        ("fsdp2-cp", Launch(8, fsdp=2, context=4)),
        ("deepspeed-zero3", Launch(8, deepspeed=3)),
        ("deepspeed-ulysses", Launch(8, deepspeed=3, ulysses=8)),
    ],
)
def test_a_launcher_says_what_the_engine_reads(name: str, expected: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is made by accelerate's own code for `accelerate launch --config_file`."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    path = ROOT / "recipes" / "accelerate" / f"{name}.yaml"
    arguments = launch_command_parser().parse_args(["--config_file", str(path), str(SCRIPT)])
    arguments, _, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        _, environment = launch.prepare_deepspeed_cmd_env(arguments)
    elif arguments.multi_gpu or arguments.use_fsdp:
        environment = launch.prepare_multi_gpu_env(arguments)
    else:
        _, environment = launch.prepare_simple_launcher_cmd_env(arguments)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("WORLD_SIZE", str(arguments.num_processes))  # which torchrun adds
    assert launch_of_environment() == expected


@pytest.mark.slow
def test_the_script_is_a_command(place: Path) -> None:
    arguments = ["--config", str(ROOT / "recipes" / "learned-to-rope.yaml"), "training.max_stepz=3"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=env, cwd=place)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith("(1) training.max_stepz: no such key. Did you mean 'max_steps'?")
    assert run.stderr.splitlines()[-1].startswith("error: ")
