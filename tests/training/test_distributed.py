"""Two processes on the CPU, DDP and FSDP2 for real: the losses of one process, saved, resumed, and loaded again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_posswap
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.engine import Finished, run_recipe
from hf_posswap.training.engine.parallel import Launch, launch_of_environment
from tests.training.engine_runs import assert_same_weights, recipe, weights_of

ROOT = Path(__file__).resolve().parents[2]
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
HALVES = ("optimizer.batch=2", "compute.device=cpu")


def launch(place: Path, name: str, *settings: str, environment: dict[str, str]) -> Finished:
    """Run a recipe by torchrun in two processes, and return what it left behind."""
    wanted = recipe(place, *HALVES, *settings, f"out={place / name}", kind="llama")
    path = place / f"{name}.json"  # which is YAML too
    path.write_text(json.dumps(to_dict(wanted)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    run = subprocess.run(
        [*command, str(ROOT / "recipes" / "train.py"), "--config", str(path)],
        capture_output=True,
        text=True,
        env=env,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    report = json.loads((place / name / "report.json").read_text())
    return Finished(place / name, place / name / "model", report)


def losses(done: Finished) -> list[float]:
    lines = (done.folder / "log.jsonl").read_text().splitlines()
    return [entry["loss"] for line in lines if "loss" in (entry := json.loads(line))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "settings"),
    [({}, ()), ({}, ("optimizer.accumulate=2", "train.what=lora", "train.rank=2")), (FSDP, ())],
    ids=["ddp", "ddp-lora-accumulated", "fsdp2"],
)
def test_two_processes_are_one(tmp_path: Path, environment: dict[str, str], settings: tuple[str, ...]) -> None:
    one = run_recipe(recipe(tmp_path, "compute.device=cpu", *settings, f"out={tmp_path / 'one'}", kind="llama"))
    two = launch(tmp_path, "two", *settings, environment=environment)
    assert losses(two) == pytest.approx(losses(one), abs=2e-5)
    assert losses(one)[-1] < losses(one)[0]
    held = weights_of(one)
    for name, weight in weights_of(two).items():
        torch.testing.assert_close(weight, held[name], rtol=0, atol=1e-3)
    model = hf_posswap.load(two.model)
    assert model.config.posswap["scheme"]["name"] == "rope"
    assert type(hf_posswap.patching.plan.unwrap(model)).__name__.endswith("LlamaForCausalLM")

    cut = tmp_path / "cut"
    shutil.copytree(two.folder, cut)
    for left in ("report.json", "done.json"):
        (cut / left).unlink()
    shutil.rmtree(cut / "model")
    shutil.rmtree(cut / "checkpoints" / "checkpoint-6")
    again = launch(tmp_path, "cut", *settings, environment=environment)
    assert losses(again) == losses(two)
    assert_same_weights(again, two)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch()),
        ({"WORLD_SIZE": "4"}, Launch(4)),
        (FSDP | {"WORLD_SIZE": "2"}, Launch(2, fsdp=2)),
        ({"ACCELERATE_USE_FSDP": "true"}, Launch(fsdp=1)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, Launch(deepspeed=3)),
        (
            {
                "WORLD_SIZE": "8",
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_CP_SIZE": "4",
                "PARALLELISM_CONFIG_SP_SIZE": "1",
            },
            Launch(8, context=4),
        ),
    ],
)
def test_the_launch_is_read_from_the_environment(
    environment: dict[str, str], expected: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", *FSDP):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch_of_environment() == expected


def test_processes_that_share_a_sequence_read_the_same_windows() -> None:
    assert Launch(8, context=4).replicas == 2
    assert Launch(8, ulysses=8).replicas == 1
    assert Launch(8).replicas == 8
    assert (Launch(8).shards, Launch(8, fsdp=2).shards, Launch(8, deepspeed=2).shards) == (False, True, False)
