"""Trainings on small tasks: the loss covers only the answers, and each step has examples of one length."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import hf_posswap
from hf_posswap.errors import NumericError
from hf_posswap.evaluation.store import unit_key
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import write_json
from recipes.studies.algorithms import TASKS, Example
from recipes.studies.running import versions

_REPORT = "report.json"
_WARMUP, _LEAST = 0.05, 0.1
"""Warm-up as a share of the steps, and the final learning rate as a share of the peak, after a cosine."""
_BETAS, _DECAY = (0.9, 0.95), 0.1
_LOGGED = 10


@dataclass(frozen=True)
class TaskRun:
    """One training.

    Attributes:
        start: folder of random weights and a tokenizer.
        task: of `TASKS`.
        scheme: of the swap before training; "learned": no swap.
        max_length: of the swap.
        longest: letters of the longest example.
        steps: of training.
        batch: examples a step.
        rate: learning rate.
        seed: of the examples.
        place: the folder of the study's work.
    """

    start: Path
    task: str
    scheme: str
    max_length: int
    longest: int
    steps: int
    batch: int
    rate: float
    seed: int
    place: Path

    @property
    def folder(self) -> Path:
        """The folder of the run, named after everything that affects the weights."""
        named = asdict(self) | {"start": self.start.name, "place": "", "versions": versions()}
        return self.place / "runs" / f"{self.task}-{self.scheme}-{unit_key(named)[:10]}"

    @property
    def model(self) -> Path:
        """The folder of the finished model."""
        return self.folder / "model"

    def finish(self) -> None:
        """Train, unless it is done.

        Raises:
            NumericError: a loss that is not finite.
        """
        if (self.folder / _REPORT).is_file():
            return
        model, tokenizer = hf_posswap.load(self.start), load_tokenizer(self.start, instead="save it with the model")
        if self.scheme != "learned":
            hf_posswap.patch_model(model, self.scheme, max_length=self.max_length)
        losses = self._train(model.train(), tokenizer)
        hf_posswap.save(model.eval(), self.model, tokenizer=tokenizer, overwrite=True)
        write_json(self.folder / _REPORT, {"losses": losses})  # written last, so that it marks a complete run

    def _train(self, model: Any, tokenizer: Any) -> list[float]:
        optimizer = make_optimizer(model, self.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_share(step, self.steps))
        random, losses = np.random.default_rng(self.seed), []
        lengths = np.arange(1, self.longest + 1)
        for step in range(self.steps):
            length = int(random.choice(lengths, p=lengths / lengths.sum()))  # longer examples are drawn more often
            batch_examples = [TASKS[self.task](random, length) for _ in range(self.batch)]
            loss = answer_loss(model, *tokens_of_answers(tokenizer, batch_examples))
            if not bool(loss.isfinite()):
                raise NumericError(
                    f"{self.task}, {self.scheme}: the loss of step {step} is not finite; lower the rate."
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        return [float(np.mean(losses[i : i + _LOGGED])) for i in range(0, len(losses), _LOGGED)]


def tokens_of_answers(tokenizer: Any, task_examples: list[Example]) -> tuple[torch.Tensor, int]:
    """Return ids [B, L] of questions with their answers, and how many of the last tokens are the answer.

    Args:
        tokenizer: of bytes, so that examples of one length have equally many tokens.
        task_examples: of one length.
    """
    rows = [tokenizer(question + answer, add_special_tokens=False)["input_ids"] for question, answer in task_examples]
    count = len(tokenizer(task_examples[0][1], add_special_tokens=False)["input_ids"])
    return torch.tensor([[tokenizer.bos_token_id, *row] for row in rows]), count


def answer_loss(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the mean loss of the last `count` tokens of `ids` [B, L]."""
    ids = ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, -count - 1 : -1]  # [B, count, V]
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, -count:].flatten())


def make_optimizer(model: Any, rate: float) -> torch.optim.Optimizer:
    """Return AdamW for the trainable parameters of `model`, with weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": _DECAY},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=_BETAS)


def rate_share(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step: linear warm-up, then a cosine down to a tenth.

    Example:
        >>> [round(rate_share(step, 100), 2) for step in (0, 4, 5, 100)]
        [0.2, 1.0, 1.0, 0.1]
    """
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return _LEAST + (1 - _LEAST) * 0.5 * (1 + math.cos(math.pi * done))
