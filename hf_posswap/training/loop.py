"""A plain training loop: AdamW, warm-up and cosine, gradient clipping; stopped anywhere, it goes on bit for bit."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posswap.errors import CheckpointError, NumericError
from hf_posswap.text.tokens import check_token_ids
from hf_posswap.training.windows import Windows
from hf_posswap.utils.atomic_io import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAVE_SECONDS = 10.0
_SAVE_SHARE = 0.05
_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
        steps: optimizer steps.
        learning_rate: after the warm-up.
        final_rate: share of the learning rate that is left at the end of the cosine.
        warmup: steps of linear warm-up.
        weight_decay: of matrices; vectors have none.
        clip: largest norm of the whole gradient.
        seed: of dropout, where the model has any; the batches have their own.
    """

    steps: int
    learning_rate: float = 1e-3
    final_rate: float = 0.1
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0.

        Example:
            >>> settings = TrainSettings(steps=100, learning_rate=1.0, warmup=10)
            >>> settings.rate(0), settings.rate(9), round(settings.rate(99), 2)
            (0.1, 1.0, 0.1)
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass
class Trained:
    """What training gave.

    Attributes:
        losses: mean loss of each step, in nats a token.
        seconds: spent on the steps, over every run that took part.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train(
    model: PreTrainedModel,
    windows: Windows,
    settings: TrainSettings,
    *,
    resume: Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train `model` in place on `windows` with next-token loss, and leave it in eval mode.

    Args:
        model: a causal model on any device; parameters that need no gradient stay as they are.
        windows: the batches.
        settings: how.
        resume: file that keeps the state during training, so that the same call goes on after an interruption; it
            stays after the last step for the caller to delete.
        on_step: called after each step with the number of steps done and the loss.

    Raises:
        DataError: a token id that the model does not have.
        NumericError: the loss is no longer a number.
        CheckpointError: `resume` cannot be read or written, or belongs to another training.

    Example:
        >>> import numpy as np
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
        >>> windows = Windows(np.arange(64) % 16, length=8, batch=4, seed=0)
        >>> len(train(model, windows, TrainSettings(steps=3)).losses)
        3
    """
    check_token_ids(model, windows.tokens)
    optimizer = _optimizer(model, settings)
    identity = {"settings": dataclasses.asdict(settings), "length": windows.length, "batch": windows.batch}
    identity |= {"windows_seed": windows.seed}
    trained = _restore(resume, identity, model, optimizer) if resume is not None and resume.exists() else Trained()
    model.train()
    saved_at, save_seconds, started = time.monotonic(), 0.0, time.monotonic()
    before = trained.seconds
    for step in range(len(trained.losses), settings.steps):
        trained.losses.append(_step(model, optimizer, windows, settings, step))
        now = time.monotonic()
        trained.seconds = before + now - started
        if resume is not None and now - saved_at > max(_SAVE_SECONDS, save_seconds / _SAVE_SHARE):
            _save(resume, identity, model, optimizer, trained)
            saved_at = time.monotonic()
            save_seconds = saved_at - now
        if on_step is not None:
            on_step(step + 1, trained.losses[-1])
    model.eval()
    return trained


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, windows: Windows, settings: TrainSettings, step: int
) -> float:
    ids = windows.at(step).to(model.device)
    # the mask says that all tokens are real; without it some models guess packed documents from positions
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(settings.seed * 1_000_003 + step)
        loss: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
    value = loss.item()
    if not math.isfinite(value):
        raise NumericError(
            f"the loss became {value} at step {step + 1} of {settings.steps} (learning rate "
            f"{settings.rate(step):.2g}): take a smaller learning rate or a longer warm-up."
        )
    loss.backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], settings.clip)
    for group in optimizer.param_groups:
        group["lr"] = settings.rate(step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value


def _optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    learned = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in learned if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=_BETAS)


def _save(
    path: Path, identity: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, trained: Trained
) -> None:
    state = {"identity": identity, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with replacing(path) as temporary:
        torch.save(state | dataclasses.asdict(trained), temporary)


def _restore(path: Path, identity: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["identity"] != identity:
            raise CheckpointError(
                f"{path} belongs to another training: {state['identity']}, asked for {identity}. "
                "Delete it to start anew."
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return Trained(list(state["losses"]), float(state["seconds"]))
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged file raises in torch.load
        raise CheckpointError(f"cannot go on from {path}: {error}. Delete it to start anew.") from error
