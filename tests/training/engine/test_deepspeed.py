"""DeepSpeed's ZeRO-2 and ZeRO-3 in two processes on the CPU: the losses of one, saved, resumed, loaded again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_posswap
from hf_posswap.compat.accelerate_state import launch_arguments, launch_environment
from tests import forked
from tests.training.engine.test_distributed import (
    LAUNCHERS,
    SCRIPT,
    STAGES,
    assert_alike,
    assert_goes_on,
    finished,
    launch,
    losses,
    one_process,
    written,
)
from tests.training.engine_runs import weights_of, write_model

pytestmark = pytest.mark.slow
SGD = ("training.optim=sgd", "training.learning_rate=0.3")
"""Plain gradients: Adam makes steps of the rounding of those that are zero, of biases of keys and of fire's shifts."""
LORA = ("peft.peft_type=LORA", "peft.r=2")
FITTED: dict[str, Any] = {"swap": {"scheme": {"name": "rope", "partial": 0.5}, "fit": 4}, "kind": "gpt2"}


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Iterator[None]:
    """Have DeepSpeed take the CPU and torch's own gloo; its way through shared memory is compiled for a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        found = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        patch.setitem(found.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        yield


def zero(place: Path, stage: int) -> str:
    """Write a file of DeepSpeed that cuts every weight, however small, and return the setting that names it."""
    shards = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    path = place / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage, **shards}}))
    return f"training.deepspeed={path}"


@pytest.mark.parametrize(
    ("stage", "settings", "values"),
    [
        (2, ("training.gradient_accumulation_steps=2", *LORA), {}),
        (3, (), {}),
        (3, LORA, {"swap": {"scheme": {"name": "kerple"}}}),
        (3, SGD, FITTED),
        (3, (), {"stages": STAGES}),
    ],
    ids=["zero2-lora-accumulated", "zero3", "zero3-lora-kerple", "zero3-fitted", "zero3-stages"],
)
def test_two_processes_are_one(tmp_path: Path, stage: int, settings: tuple[str, ...], values: dict[str, Any]) -> None:
    write_model(tmp_path / "gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # each process drops on its own
    one = one_process(tmp_path, *settings, **values)
    how = (*settings, zero(tmp_path, stage))
    two = launch(written(tmp_path, "two", *how, **values))
    assert_alike(two, one)
    hf_posswap.verify_swap(hf_posswap.load(two.model))
    if not values.get("stages"):
        assert_goes_on(tmp_path, two, {}, *how, **values)


@pytest.mark.parametrize("name", ["kerple", "fire", "t5"])
def test_learned_positions_are_trained_and_saved_where_they_are_cut(tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {"swap": {"scheme": {"name": name}}}
    settings = ("trainable.what=positions", *SGD)
    one = one_process(tmp_path, *settings, **values)
    two = launch(written(tmp_path, "two", *settings, zero(tmp_path, 3), **values))
    assert losses(two) == pytest.approx(losses(one), abs=2e-5)
    start = hf_posswap.load(tmp_path / "llama").state_dict()
    held, found = weights_of(one), weights_of(two)
    early = load_file(two.folder / "checkpoints" / "checkpoint-3" / "model.safetensors")
    learned = [key for key in found if key not in start]
    assert [key for key in learned if not torch.equal(found[key], early[key])]
    for key in learned:
        torch.testing.assert_close(found[key], held[key], rtol=1e-4, atol=1e-6)
    assert [key for key in start if not torch.equal(found[key].view_as(start[key]), start[key])] == []


def test_accelerates_file_that_is_shipped_trains_as_one_process(tmp_path: Path) -> None:
    """What the launcher would tell its processes, in processes that are forked."""
    arguments = launch_arguments(LAUNCHERS / "deepspeed-zero3.yaml", 2)
    told = launch_environment(arguments) | {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_GRADIENT_CLIPPING": "0.5"}
    one = one_process(tmp_path, "training.max_grad_norm=0.5")
    two = launch(written(tmp_path, "two"), told)
    assert_alike(two, one)
    assert json.loads((two.folder / "recipe.json").read_text())["training"]["max_grad_norm"] == 0.5
    assert_goes_on(tmp_path, two, told)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather:FutureWarning")  # Trainer calls it
def test_two_processes_that_share_a_sequence_are_one(tmp_path: Path) -> None:
    """Ulysses with ZeRO-3, as the file that is shipped says: each process has half of every text, then half the heads.

    accelerate connects processes on a CPU by torch alone; on GPUs it has DeepSpeed do it, as is done here.
    """
    told = launch_environment(launch_arguments(LAUNCHERS / "deepspeed-ulysses.yaml", 2))
    told |= {"ACCELERATE_MIXED_PRECISION": "no", "PARALLELISM_CONFIG_SP_SIZE": "2"}
    config = written(tmp_path, "two", "objective.chunk=0", "training.per_device_train_batch_size=4")

    def work() -> None:
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        forked.run_script(SCRIPT, "--config", str(config))

    forked.run_ranks(work, environment=told)
    assert_alike(finished(config), one_process(tmp_path, "objective.chunk=0"))
