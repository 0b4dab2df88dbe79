"""Trainings on a GPU: what the CPU gives, and each way of computing it against the plain one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import hf_posswap
from hf_posswap.training.chunked_loss import summed_cross_entropy
from hf_posswap.training.engine import Finished
from tests.training.engine_runs import trained, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(place: Path, name: str, *settings: str) -> Finished:
    return trained(
        place, "training.learning_rate=1e-3", "training.save_steps=99", *settings, f"out={place / name}", kind="llama"
    )


def assert_alike(one: Finished, other: Finished, tolerance: float) -> None:
    losses = [done.report["phases"][0]["last_loss"] for done in (one, other)]
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)
    held = weights_of(one)
    for name, weight in weights_of(other).items():
        torch.testing.assert_close(weight, held[name], rtol=0, atol=tolerance)


def test_a_gpu_trains_as_a_cpu_does(tmp_path: Path) -> None:
    assert_alike(run(tmp_path, "cpu", "training.use_cpu=true"), run(tmp_path, "gpu"), 5e-3)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (("training.optim=adamw_torch",), 1e-3),
        (("training.torch_compile=true",), 5e-3),
        (("training.gradient_checkpointing=true",), 1e-3),
        (("training.gradient_checkpointing=true", "training.gradient_checkpointing_kwargs.offload=true"), 1e-3),
        (("objective.chunk=0",), 1e-3),
        (("training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=4"), 5e-3),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_how_it_is_computed_changes_nothing(tmp_path: Path, settings: tuple[str, ...], tolerance: float) -> None:
    assert_alike(run(tmp_path, "plain"), run(tmp_path, "other", *settings), tolerance)


def test_bfloat16_learns_with_float32_weights(tmp_path: Path) -> None:
    done = run(tmp_path, "half", "training.bf16=true", "training.max_steps=30", "training.learning_rate=1e-2")
    phase = done.report["phases"][0]
    assert phase["last_loss"] < phase["first_loss"] - 0.3
    assert {weight.dtype for weight in weights_of(done).values()} == {torch.float32}
    assert hf_posswap.load(done.model).config.posswap["scheme"]["name"] == "rope"


def test_a_stopped_training_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", "training.save_steps=3")
    cut = tmp_path / "cut"
    shutil.copytree(whole.folder, cut)
    for left in ("report.json", "done.json"):
        (cut / left).unlink()
    for left in ("model", "checkpoints/checkpoint-6"):
        shutil.rmtree(cut / left)
    assert_alike(whole, run(tmp_path, "cut", "training.save_steps=3"), 1e-4)


def test_the_fused_cross_entropy_is_torchs() -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    source = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(37, 1009, device="cuda", generator=source).requires_grad_()
    targets = torch.randint(1009, (37,), device="cuda", generator=source)
    expected = functional.cross_entropy(logits, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, logits)
    again = logits.detach().clone().requires_grad_()  # its memory is used for the gradient
    found = summed_cross_entropy(again * 1.0, targets)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(found, again)[0], gradient, rtol=0, atol=1e-5)
