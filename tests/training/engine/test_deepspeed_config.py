"""A configuration of DeepSpeed beside a recipe: what it leaves out is the recipe's, all else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_posswap.errors import CheckpointError, ConfigError
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine import run_recipe
from hf_posswap.training.engine.arguments import argument_values
from hf_posswap.training.engine.checkpoints import identity_of, newest, seal
from hf_posswap.training.engine.parallel import Launch, as_launched, launch_of, launch_of_environment, refuse_deepspeed
from tests.training.engine_runs import recipe

ZERO_2 = {"zero_optimization": {"stage": 2}}
ZERO_3 = {"zero_optimization": {"stage": 3}}
GATHERS = "stage3_gather_16bit_weights_on_model_save"


@pytest.fixture(autouse=True)
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")


def by_launcher(monkeypatch: pytest.MonkeyPatch, **said: str) -> None:
    """Have the environment say what accelerate launch puts there for DeepSpeed."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for name, value in said.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)


def with_file(place: Path, held: dict[str, Any], *settings: str) -> Recipe:
    path = place / "zero.json"
    path.write_text(json.dumps(held))
    return recipe(place, f"training.deepspeed={path}", *settings)


def test_what_the_file_leaves_out_is_the_recipes(tmp_path: Path) -> None:
    given = argument_values(with_file(tmp_path, ZERO_3), tmp_path)["deepspeed"]
    auto = ("gradient_clipping", "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    assert {name: given[name] for name in auto} == dict.fromkeys(auto, "auto")
    assert given["bf16"] == given["fp16"] == {"enabled": "auto"}
    assert given["zero_optimization"] == {"stage": 3, GATHERS: True}
    kept = ZERO_2 | {"gradient_clipping": 1.0, "bf16": {"enabled": False}}
    given = argument_values(with_file(tmp_path, kept), tmp_path)["deepspeed"]
    assert {name: given[name] for name in kept} == kept
    assert "fp16" not in given


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (
            {"optimizer": {"type": "AdamW"}},
            r"has 'optimizer': the rates of `trainable` and training.optim would be lost",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, r"has 'scheduler': training.lr_scheduler_type would be lost"),
        ({"tensor_parallel": {"autotp_size": 2}}, r"has 'tensor_parallel': it splits the heads"),
        ({"gradient_clipping": 0.5}, r"sets max_grad_norm to 0.5, and training.max_grad_norm is 1.0: leave it out"),
        ({"gradient_accumulation_steps": 4}, r"sets gradient_accumulation_steps to 4, and training.* is 1"),
        ({"train_micro_batch_size_per_gpu": 1}, r"sets per_device_train_batch_size to 1, and training.* is 4"),
        ({"bf16": {"enabled": True}}, r"sets bf16 to True, and training.bf16 is False"),
        ({"zero_optimization": {"stage": 3, GATHERS: False}}, rf"has {GATHERS} .* off, so there would be nothing"),
    ],
)
def test_what_would_make_another_training_is_refused_before_anything_loads(
    tmp_path: Path, held: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run_recipe(with_file(tmp_path, ZERO_2 | held, "model.name=not-there"))
    refuse_deepspeed(with_file(tmp_path, ZERO_2))


@pytest.mark.parametrize("text", ["[]", "{", '{"zero_optimization": {"stage": "three"}}', '{"zero_optimization": 3}'])
def test_no_configuration_is_said_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "zero.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"training.deepspeed: "):
        launch_of(recipe(tmp_path, f"training.deepspeed={path}"))


def test_without_a_launcher_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match=r"training.deepspeed needs a launcher, also for one process: torchrun"):
        run_recipe(with_file(tmp_path, ZERO_2))


def test_a_launcher_that_asks_for_a_cpu_would_leave_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_launcher(monkeypatch, USE_CPU="true")
    with pytest.raises(ConfigError, match=r"use_cpu: true, with which accelerate silently ignores DeepSpeed"):
        run_recipe(recipe(tmp_path))


def test_a_file_of_deepspeeds_own_that_the_launcher_names_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5}
    path = tmp_path / "launched.json"
    path.write_text(json.dumps(ZERO_3 | said | {"bf16": {"enabled": True}}))
    by_launcher(monkeypatch, DEEPSPEED_CONFIG_FILE=str(path))
    assert launch_of_environment().deepspeed == 3
    launched, lines = as_launched(with_file(tmp_path, ZERO_2, "training.fp16=true"))
    how = launched.training
    assert (how.gradient_accumulation_steps, how.per_device_train_batch_size, how.max_grad_norm) == (2, 1, 0.5)
    assert (how.bf16, how.fp16, how.deepspeed) == (True, False, str(path))
    assert [line.removeprefix("accelerate's file wins over the recipe: ") for line in lines] == [
        "mixed precision bf16, not fp16.",
        "2 batches a step, not 1.",
        "batches of 1 windows, not 4.",
        "gradients clipped at 0.5, not 1.0.",
        "DeepSpeed as it says, not training.deepspeed.",
    ]
    refuse_deepspeed(launched)
    assert as_launched(launched) == (launched, [])


def test_clipping_that_the_launcher_says_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_launcher(
        monkeypatch, GRADIENT_CLIPPING="0.25", DEEPSPEED_ZERO_STAGE="3", DEEPSPEED_ZERO3_SAVE_16BIT_MODEL="true"
    )
    launched, lines = as_launched(recipe(tmp_path))
    assert launched.training.max_grad_norm == 0.25
    assert lines == ["accelerate's file wins over the recipe: gradients clipped at 0.25, not 1.0."]
    refuse_deepspeed(launched)
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")
    with pytest.raises(ConfigError, match=r"zero3_save_16bit_model in accelerate's file\) off"):
        refuse_deepspeed(launched)


def test_a_checkpoint_of_deepspeed_is_no_plain_trainers(tmp_path: Path) -> None:
    """A plain Trainer would take its weights, and begin with a new optimizer without a word."""
    wanted, checkpoint = recipe(tmp_path), tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    seal(checkpoint, 3, identity_of(wanted, Launch(2, deepspeed=2)))
    assert newest(tmp_path, identity_of(wanted, Launch(2, deepspeed=2))) == checkpoint
    for other, named in ((Launch(2), "None"), (Launch(2, deepspeed=3), "'ZeRO-3'"), (Launch(2, fsdp=2), "'FSDP2'")):
        with pytest.raises(CheckpointError, match=rf"another training \(sharding: 'ZeRO-2', now {named}\)"):
            newest(tmp_path, identity_of(wanted, other))
