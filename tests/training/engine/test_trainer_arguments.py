"""What transformers' arguments do in a training: schedules, optimizers, evaluation; what a launcher says instead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import get_scheduler

import hf_posswap
from hf_posswap.compat.accelerate_state import launch_arguments, launch_environment
from hf_posswap.errors import ConfigError
from hf_posswap.training.adapting import run_recipe
from hf_posswap.training.engine import Services
from hf_posswap.training.engine.parallel import as_launched, launch_of
from tests.training.engine_runs import recipe, trained, weights_of


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("cosine", {}),
        ("polynomial", {"lr_end": 1e-4, "power": 2.0}),
        ("warmup_stable_decay", {"num_decay_steps": 3}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
    ],
)
def test_the_rate_of_each_step_is_that_of_transformers_schedule(tmp_path: Path, kind: str, how: dict[str, Any]) -> None:
    rate, steps, warmup = 1e-3, 8, 3
    given = {"lr_scheduler_kwargs": how} if how else {}  # another schedule takes those of the one below away
    settings = {"lr_scheduler_type": kind, "max_steps": steps, "warmup_steps": warmup, "learning_rate": rate}
    done = trained(tmp_path, kind="llama", training={**settings, **given})
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = get_scheduler(
        kind, optimizer, num_warmup_steps=warmup, num_training_steps=steps, scheduler_specific_kwargs=how or None
    )
    expected = []
    for _ in range(steps):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    found = [entry["learning_rate"] for entry in log_of(done.folder) if "loss" in entry]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "rate", "more"),
    [("adafactor", 1e-2, ()), ("sgd", 1.0, ("training.optim_args='momentum=0.5'",)), ("rmsprop", 1e-3, ())],
)
def test_other_optimizers_train(tmp_path: Path, optim: str, rate: float, more: tuple[str, ...]) -> None:
    settings = (f"training.optim={optim}", f"training.learning_rate={rate}", "training.max_steps=20", *more)
    done = trained(tmp_path, *settings, "training.save_steps=20", kind="llama")
    state = torch.load(done.folder / "checkpoints" / "checkpoint-20" / "optimizer.pt", weights_only=True)
    kept = {name for entry in state["state"].values() for name in entry}
    assert kept & {"adafactor": {"exp_avg_sq_row"}, "sgd": {"momentum_buffer"}, "rmsprop": {"square_avg"}}[optim]
    if more:
        assert {group["momentum"] for group in state["param_groups"]} == {0.5}
    (phase,) = done.report["phases"]
    assert phase["last_loss"] < phase["first_loss"] - 0.3


@pytest.mark.slow
def test_what_sgd_does_to_the_weights_is_the_gradient_times_the_rate(tmp_path: Path) -> None:
    """One step without clipping: the difference of two rates is in proportion to them, whatever the gradient is."""
    settings = ("training.optim=sgd", "training.max_steps=1", "training.warmup_steps=0", "training.max_grad_norm=0",
                "training.lr_scheduler_type=constant", "training.lr_scheduler_kwargs=null")  # fmt: skip
    start = {
        name: p.detach() for name, p in hf_posswap.load(recipe(tmp_path, kind="llama").model.name).named_parameters()
    }
    moved = []
    for rate in (0.25, 0.5):
        done = trained(
            tmp_path, *settings, f"training.learning_rate={rate}", f"out={tmp_path / str(rate)}", kind="llama"
        )
        moved.append({name: weight - start[name] for name, weight in weights_of(done).items() if name in start})
    assert all(float(change.abs().max()) > 0 for change in moved[0].values())
    for name, change in moved[0].items():
        torch.testing.assert_close(2 * change, moved[1][name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("training.lr_scheduler_kwargs={cycles: 2}",), r"training: .*unexpected keyword argument 'cycles'"),
        (("training.eval_strategy=steps", "training.eval_steps=2.5"), r"training: --eval_steps must be an integer"),
        (("training.optim=lion_8bit",), r"training.optim: .*bitsandbytes"),
        (("training.optim_args='amsgrad=True'",), r"optim_args: transformers passes no amsgrad to adamw_torch"),
        (
            ("training.optim=sgd", "training.optim_args='momentum=0, nesterov=no, momentun=0.9'"),
            r"optim_args: transformers passes no momentun to sgd",
        ),
        (
            ("training.optim=adafactor", "training.optim_args='scale_parameter=True'"),
            r"no scale_parameter to adafactor",
        ),
        (("training.lr_scheduler_type=constant",), r"warmup_steps: constant has no warm-up, and .* its 2 steps"),
        (
            ("training.lr_scheduler_type=reduce_lr_on_plateau", "training.eval_strategy=steps"),
            r"warmup_steps: reduce_lr_on_plateau has no warm-up",
        ),
        (("training.fp16=true", "training.use_cpu=true"), r"training.fp16: .* on a CPU accelerate trains in float32"),
        (("training.eval_strategy=steps",), r"training.eval_strategy needs Services.evaluate"),
    ],
)
def test_what_transformers_refuses_is_said_without_a_traceback(
    tmp_path: Path, settings: tuple[str, ...], says: str
) -> None:
    services = None if "needs" in says else Services(evaluate=lambda *_: {})
    with pytest.raises(ConfigError, match=says):
        trained(tmp_path, *settings, services=services)


@pytest.mark.slow
def test_held_out_loss_is_measured_as_eval_strategy_says_and_steers_the_schedule(tmp_path: Path) -> None:
    how = "{patience: 0, factor: 0.5, threshold: 1000.0, threshold_mode: abs}"
    settings = ("training.eval_strategy=steps", "training.eval_steps=2", "training.eval_on_start=true",
                "training.lr_scheduler_type=reduce_lr_on_plateau", "training.warmup_steps=0",
                f"training.lr_scheduler_kwargs={how}")  # fmt: skip
    done = run_recipe(recipe(tmp_path, *settings, kind="llama"))
    entries = log_of(done.folder)
    assert [entry["step"] for entry in entries if "nll" in entry] == [0, 2, 4, 6]
    rates = [entry["learning_rate"] for entry in entries if "loss" in entry]
    assert rates == [1e-2] * 4 + [5e-3] * 2  # the look at step 4 is not 1000 nats better than that at step 2
    assert entries[-1]["nll"] != entries[0]["nll"]


def test_a_checkpoint_of_the_best_loss_at_a_length_is_one_where_that_loss_fell(tmp_path: Path) -> None:
    settings = ("training.eval_strategy=steps", "training.eval_steps=1", "training.save_strategy=best",
                "training.metric_for_best_model=loss_at_24", "evaluation.lengths=[24, 32]",
                "training.save_total_limit=9")  # fmt: skip
    losses = iter((5.0, 4.0, 6.0, 4.5, 3.0, 3.5, 1.0))
    services = Services(evaluate=lambda *_, **__: {24: next(losses), 32: 2.0})
    done = trained(tmp_path, *settings, services=services, kind="llama")
    steps = {int(path.name.partition("-")[2]) for path in (done.folder / "checkpoints").iterdir()}
    assert steps == {1, 2, 5}


@pytest.mark.slow
def test_the_report_tells_time_speed_and_held_out_loss(tmp_path: Path) -> None:
    done = run_recipe(recipe(tmp_path, kind="llama"))
    report = done.report
    tokens = sum(phase["tokens"] for phase in report["phases"])
    assert report["train_runtime"] > 0
    assert report["tokens_per_second"] == pytest.approx(tokens / report["train_runtime"], rel=0.01)
    assert list(report["nll"]) == ["32"]
    assert " tokens a second." in (done.folder / "report.md").read_text()
    assert (done.folder / "loss.png").is_file()


def test_what_accelerates_file_says_wins_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("training.bf16=true", "training.gradient_accumulation_steps=4")
    wanted = recipe(tmp_path, *asked, training={"deepspeed": {"zero_optimization": {"stage": 3}}})
    assert as_launched(wanted) == (wanted, [])
    assert launch_of(wanted).shards
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv(
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "None"
    )  # as accelerate writes what its file leaves out
    assert as_launched(wanted) == (wanted, [])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    launched, said = as_launched(wanted)
    how = launched.training
    assert (how.bf16, how.fp16, how.gradient_accumulation_steps, how.deepspeed) == (False, True, 2, None)
    assert [line.partition(": ")[2] for line in said] == [
        "mixed precision fp16, not bf16.",
        "2 batches a step, not 4.",
        "DeepSpeed as it says, not training.deepspeed.",
    ]
    assert as_launched(launched) == (launched, [])
    assert launch_of(launched).deepspeed == 2


@pytest.mark.slow
def test_a_launched_precision_is_another_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    done = trained(tmp_path, "training.max_steps=2", kind="llama")
    assert json.loads((done.folder / "recipe.json").read_text())["training"]["bf16"] is True


FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
ZERO = {"zero_stage": 2, "zero3_init_flag": False}


@pytest.mark.parametrize(
    ("file", "asked", "kept", "says"),
    [
        ({"mixed_precision": "fp16"}, ("bf16=true",), {"bf16": False, "fp16": True}, "mixed precision fp16, not bf16"),
        ({"mixed_precision": "no"}, ("bf16=true",), {"bf16": True}, ""),
        (
            {"dynamo_config": {"dynamo_backend": "AOT_EAGER"}},
            ("torch_compile=true",),
            {"torch_compile_backend": "aot_eager"},
            "layers compiled by aot_eager, not inductor",
        ),
        (
            FSDP2,
            ("gradient_checkpointing=true",),
            {"gradient_checkpointing": False},
            "FSDP checkpoints activations, not training.gradient_checkpointing",
        ),
        (FSDP2, ("deepspeed={zero_optimization: {stage: 2}}",), {"deepspeed": None}, "FSDP, not training.deepspeed"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO | {"gradient_accumulation_steps": 2}},
            ("gradient_accumulation_steps=4",),
            {"gradient_accumulation_steps": 2},
            "2 batches a step, not 4",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO | {"gradient_clipping": 0.5}},
            (),
            {"max_grad_norm": 0.5, "gradient_accumulation_steps": 1},
            "gradients clipped at 0.5, not 1.0",
        ),
    ],
    ids=["precision", "no-precision", "compiler", "activations", "fsdp", "batches", "clipping"],
)
def test_each_key_that_both_have_is_accelerates_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: dict[str, Any],
    asked: tuple[str, ...],
    kept: dict[str, Any],
    says: str,
) -> None:
    """The environment is made by accelerate's own code for `accelerate launch --config_file`."""
    path = tmp_path / "accelerate.yaml"
    where = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 1}
    path.write_text(yaml.safe_dump(where | {"num_processes": 2, "mixed_precision": "no", "use_cpu": False} | file))
    for name, value in launch_environment(launch_arguments(path, None)).items():
        monkeypatch.setenv(name, value)
    wanted = recipe(tmp_path, *(f"training.{setting}" for setting in asked))
    launched, lines = as_launched(wanted)
    assert {name: getattr(launched.training, name) for name in kept} == kept
    assert lines == ([f"accelerate's file wins over the recipe: {says}."] if says else [])
    assert as_launched(launched) == (launched, [])


def test_float8_that_accelerates_file_asks_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match=r"asks for mixed_precision fp8, which no swap was tested with: use bf16"):
        trained(tmp_path)


@pytest.mark.slow
def test_what_accelerate_writes_into_the_environment_is_gone_after_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")

    def writes(*_: Any) -> dict[int, float]:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as accelerate does where a recipe brings DeepSpeed
        return {32: 1.0}

    trained(tmp_path, "training.eval_strategy=steps", "training.eval_steps=6", services=Services(evaluate=writes))
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ
    assert os.environ["ACCELERATE_DYNAMO_BACKEND"] == "NO"
