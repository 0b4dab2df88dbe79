"""Measuring one model: losses at every length it can run, and the passkey grid; kept, so that no run repeats it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.errors import DataError
from hf_posswap.evaluation import (
    PasskeyTask,
    change_with_length,
    loss_by_position,
    measure_losses,
    passkey_grid,
    perplexity_by_length,
    reach_of,
    sliding_losses,
)
from hf_posswap.quickstart.base import Base
from hf_posswap.quickstart.settings import QuickstartSettings
from hf_posswap.quickstart.variants import CONTROL, max_length
from hf_posswap.training import Corpus, check_token_ids, leading_tokens
from hf_posswap.utils.atomic_io import read_json, replacing, write_json
from hf_posswap.utils.progress import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Yardstick:
    """What every model is measured on.

    Attributes:
        documents: first tokens of held-out documents, [N, longest length].
        names: of the documents.
        lengths: to measure at, rising; the first is the window.
        passkey: builds the prompts; None: they cannot be asked.
        passkey_lengths: those of `lengths` that hold a prompt.
    """

    documents: np.ndarray
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    passkey: PasskeyTask | None
    passkey_lengths: tuple[int, ...]


def make_yardstick(base: Base, corpus: Corpus, settings: QuickstartSettings) -> tuple[Yardstick, str | None]:
    """Return what to measure on, and why no passkey is asked for, or None.

    Raises:
        DataError: too few held-out documents are long enough, or the tokenizer is not the model's.
    """
    longest = max_length(base, settings)
    names, documents = leading_tokens(corpus.held_out, base.tokenizer, length=longest, limit=settings.documents)
    check_token_ids(base.model, documents)
    lengths = tuple(base.window * multiple for multiple in sorted(settings.multiples))
    task, skipped = _passkey_task(base, longest)
    held = tuple(n for n in lengths if task is not None and n >= task.shortest)
    return Yardstick(documents, tuple(names), lengths, task, held), skipped


def _passkey_task(base: Base, longest: int) -> tuple[PasskeyTask | None, str | None]:
    """Return the task, without its opening where the window is too short for it; or None and why."""
    try:
        task = PasskeyTask(base.tokenizer)
        if task.shortest > base.window:
            task = PasskeyTask(base.tokenizer, header=False)
    except DataError as error:
        return None, str(error)
    if task.shortest > longest:
        return None, f"the shortest prompt takes {task.shortest} tokens, the longest length is {longest}."
    return task, None


def running_limits(model: PreTrainedModel) -> tuple[int | None, bool]:
    """Return the most tokens that `model` can run (None: no limit), and whether one pass gives every prefix's loss."""
    reach = reach_of(model)
    return reach.limit, reach.prefix_consistent


def measured(
    name: str, model: PreTrainedModel, yardstick: Yardstick, settings: QuickstartSettings, out: Path, reporter: Reporter
) -> dict[str, Any]:
    """Return what `model` does on the yardstick, from an earlier run where it was kept; per-token losses go to nll/.

    Raises:
        NumericError: a loss is not finite.
        CheckpointError: the folder cannot be written, or what an earlier run left there cannot be read.
    """
    kept = out / "parts" / f"{name}.json"
    if kept.exists():
        reporter.line(f"{name}: measured earlier, from {kept}")
        return read_json(kept)
    limit, one_pass = running_limits(model)
    lengths = [n for n in yardstick.lengths if limit is None or n <= limit]
    refused = {n: f"table ends at {limit}" for n in yardstick.lengths if n not in lengths}
    losses = _losses(name, model, yardstick, lengths, one_pass, reporter)
    for length in [max(lengths)] if one_pass else lengths:
        with replacing(out / "nll" / f"{name}-{length}.npy") as temporary, temporary.open("wb") as file:
            np.save(file, losses[length])
    scores = {score.length: dataclasses.asdict(score) for score in perplexity_by_length(losses, seed=settings.seed)}
    rows = [scores.get(n) or {"length": n, "cannot_run": refused[n]} for n in yardstick.lengths]
    change = change_with_length(losses, seed=settings.seed)
    result = {
        "one_pass": one_pass,
        "ends": refused[min(refused)] if refused else None,
        "lengths": rows,
        "change": None if refused else dict(zip(("ratio", "low", "high"), change, strict=True)),
        "positions": [dataclasses.asdict(s) for s in loss_by_position(losses[max(lengths)], seed=settings.seed)],
        "passkey": _passkey(name, model, yardstick, settings, limit, reporter),
    }
    if name == CONTROL:
        result["sliding"] = _sliding(name, model, yardstick, settings, reporter)
    write_json(kept, result)
    shown = ", ".join(f"{row['length']}: {row.get('cannot_run') or format(row['perplexity'], '.3f')}" for row in rows)
    reporter.line(f"{name}: perplexity by length  {shown}")
    return result


def _losses(
    name: str, model: PreTrainedModel, yardstick: Yardstick, lengths: list[int], one_pass: bool, reporter: Reporter
) -> dict[int, np.ndarray]:
    forwards = len(yardstick.documents) * (1 if one_pass else len(lengths))
    with reporter.task(f"{name}: measuring", forwards) as task:
        return measure_losses(model, yardstick.documents, lengths, one_pass=one_pass, on_document=task.advance)


def _sliding(
    name: str, model: PreTrainedModel, yardstick: Yardstick, settings: QuickstartSettings, reporter: Reporter
) -> dict[str, Any]:
    """Return what `model` does where it reads a window at a time: what every longer reach must be better than."""
    with reporter.task(f"{name}: sliding window", len(yardstick.documents)) as task:
        losses = sliding_losses(model, yardstick.documents, yardstick.lengths[0], on_document=task.advance)
    by_length = {length: losses[:, : length - 1] for length in yardstick.lengths}
    return {
        "lengths": [dataclasses.asdict(s) for s in perplexity_by_length(by_length, seed=settings.seed)],
        "positions": [dataclasses.asdict(s) for s in loss_by_position(losses, seed=settings.seed)],
    }


def _passkey(
    name: str,
    model: PreTrainedModel,
    yardstick: Yardstick,
    settings: QuickstartSettings,
    limit: int | None,
    reporter: Reporter,
) -> list[dict[str, Any]]:
    lengths = [n for n in yardstick.passkey_lengths if limit is None or n <= limit]
    if yardstick.passkey is None or not lengths:
        return []
    depths, trials = settings.passkey_depths, settings.passkey_trials
    with reporter.task(f"{name}: passkey", len(lengths) * len(depths) * trials) as task:
        cells = passkey_grid(
            model,
            yardstick.passkey,
            lengths=lengths,
            depths=depths,
            trials=trials,
            seed=settings.seed,
            on_prompt=task.advance,
        )
    return [dataclasses.asdict(cell) for cell in cells]
