"""The loop learns, goes on bit for bit, and stops where there is nothing to learn from."""

from __future__ import annotations

import copy
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap import patch_model
from hf_posswap.errors import CheckpointError, DataError, NumericError
from hf_posswap.training import TrainSettings, Windows, loop, train

WINDOWS = Windows(np.arange(4000) % 13, length=16, batch=4, seed=0)


def tiny(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=2, n_head=2, **options))


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_learns_a_cycle() -> None:
    model = tiny()
    trained = train(model, WINDOWS, TrainSettings(steps=150, learning_rate=1e-2))
    assert trained.losses[0] == pytest.approx(math.log(16), abs=0.2)
    assert trained.losses[-1] < 0.5
    assert not model.training


def test_one_step_is_what_torch_does_by_hand() -> None:
    settings = TrainSettings(steps=1, learning_rate=1e-2, warmup=0, weight_decay=0.5, clip=0.1)
    by_hand, model = (
        tiny(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        tiny(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    )
    ids = WINDOWS.at(0)
    logits = by_hand(ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in by_hand.parameters()))
    with torch.no_grad():
        for p in by_hand.parameters():
            gradient = p.grad * min(1.0, 0.1 / float(norm))
            p *= 1 - 1e-2 * (0.5 if p.ndim >= 2 else 0.0)
            p -= 1e-2 * gradient / (gradient.abs() + 1e-8)  # Adam's first step: both moments are the gradient's own
    train(model, WINDOWS, settings)
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scheme", [None, "rope"])
def test_resumed_equals_uninterrupted_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str | None
) -> None:
    monkeypatch.setattr(loop, "_SAVE_SECONDS", 0.0)  # save after every step
    monkeypatch.setattr(loop, "_SAVE_SHARE", math.inf)
    settings = TrainSettings(steps=8)
    start = tiny()  # with dropout
    if scheme:
        patch_model(start, scheme, max_length=32)
    whole, interrupted = copy.deepcopy(start), copy.deepcopy(start)
    losses = train(whole, WINDOWS, settings).losses

    def stop(step: int, loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(interrupted, WINDOWS, settings, resume=tmp_path / "state.pt", on_step=stop)
    torch.rand(7)  # what happens in between must not matter
    again, steps = copy.deepcopy(start), []
    trained = train(
        again, WINDOWS, settings, resume=tmp_path / "state.pt", on_step=lambda step, loss: steps.append(step)
    )
    assert steps == [6, 7, 8]
    assert trained.losses == losses
    assert same(state_of(again), state_of(whole))


def test_training_leaves_the_random_state_alone() -> None:
    model = tiny()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    train(model, WINDOWS, TrainSettings(steps=2))
    assert torch.equal(torch.rand(3), wanted)


def test_a_killed_process_goes_on(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import os, signal
from pathlib import Path
import test_loop as t
t.loop._SAVE_SECONDS, t.loop._SAVE_SHARE = 0.0, float("inf")
def stop(step, loss):
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
t.train(t.tiny(), t.WINDOWS, t.TrainSettings(steps=6), resume=Path({str(tmp_path)!r}) / "state.pt", on_step=stop)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    model, whole = tiny(), tiny()
    went_on = train(model, WINDOWS, TrainSettings(steps=6), resume=tmp_path / "state.pt")
    assert went_on.losses == pytest.approx(train(whole, WINDOWS, TrainSettings(steps=6)).losses, abs=1e-6)


def test_frozen_parameters_do_not_move() -> None:
    model = tiny()
    model.transformer.wpe.weight.requires_grad_(False)
    before = state_of(model)
    train(model, WINDOWS, TrainSettings(steps=2))
    changed = {name for name, value in state_of(model).items() if not torch.equal(value, before[name])}
    assert "transformer.wpe.weight" not in changed
    assert "transformer.wte.weight" in changed


def test_a_loss_that_is_no_number_stops_it() -> None:
    model = tiny()
    with torch.no_grad():
        model.transformer.wte.weight[0, 0] = math.nan
    with pytest.raises(NumericError, match=r"the loss became nan at step 1 of 3 .*smaller learning rate"):
        train(model, WINDOWS, TrainSettings(steps=3))


def test_tokens_of_another_model_are_refused_before_a_step() -> None:
    with pytest.raises(DataError, match="use the tokenizer that belongs to the model"):
        train(tiny(), Windows(np.arange(100), 16, 4, 0), TrainSettings(steps=1))


def test_a_state_of_another_training_or_a_damaged_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_SAVE_SHARE", math.inf)
    state = tmp_path / "state.pt"
    train(tiny(), WINDOWS, TrainSettings(steps=2), resume=state)
    with pytest.raises(CheckpointError, match=r"belongs to another training.*Delete it"):
        train(tiny(), WINDOWS, TrainSettings(steps=3), resume=state)
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cannot go on from .*Delete it to start anew"):
        train(tiny(), WINDOWS, TrainSettings(steps=2), resume=state)


def test_the_rate_rises_and_falls_as_said() -> None:
    settings = TrainSettings(steps=101, learning_rate=2.0, warmup=11, final_rate=0.25)
    assert settings.rate(0) == pytest.approx(2 / 11)
    assert settings.rate(10) == settings.rate(11) == pytest.approx(2.0)
    middle = (11 + 100) / 2
    assert settings.rate(round(middle)) == pytest.approx(2 * (0.25 + 0.75 / 2), rel=0.02)
    assert settings.rate(100) == pytest.approx(0.5)
