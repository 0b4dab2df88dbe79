"""Measurements of a training for the study of claims: its curve, losses by windows read at once, and answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hf_posswap.comparison.candidates import fingerprint
from hf_posswap.evaluation import RunStore, Scorer, measure_losses, passkey_grid, reach_of
from hf_posswap.evaluation.passkey import PasskeyTask
from recipes.studies.algorithms import TASKS, Example, examples
from recipes.studies.measuring import Texts
from recipes.studies.running import Run
from recipes.studies.task_runs import tokens_of_answers

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SMOOTHED = 5
"""Points of the log that are averaged to smooth a curve."""
_SEED = 7
"""Seed of the test examples, combined with their length; training seeds are single numbers."""


def curve_of(run: Run) -> list[list[float]]:
    """Return the loss curve of a finished run as [tokens read, mean loss since the previous point]."""
    lines = (run.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [[line["tokens"], line["loss"]] for line in map(json.loads, lines) if "loss" in line]


def share_needed(quick: np.ndarray, slow: np.ndarray) -> float | None:
    """Return the share of the tokens after which one curve is as low as another at its end; None: never.

    Args:
        quick: losses [points], after equal numbers of tokens.
        slow: likewise.

    Example:
        >>> share_needed(np.linspace(5, 0, 10), np.linspace(5, 2.5, 10)) < 0.8
        True
    """
    width = min(_SMOOTHED, len(quick))
    smooth = [np.convolve(curve, np.ones(width) / width, mode="valid") for curve in (quick, slow)]
    reached = np.flatnonzero(smooth[0] <= smooth[1][-1])
    return float((reached[0] + width) / len(quick)) if len(reached) else None


def readings(model: Any, texts: Texts, store: RunStore) -> dict[str, np.ndarray]:
    """Return the mean loss of each document, float64 [N], by the number of windows read at once, up to its limit.

    The tokens are always the same: all but the first of each window of the original length, which has no context when
    windows are read separately.

    Args:
        model: a causal model.
        texts: to read.
        store: of what was measured.
    """
    reach = reach_of(model)
    multiples = [m for m in texts.multiples if reach.limit is None or m * texts.window <= reach.limit]
    named = {"what": "readings", "model": fingerprint(model), "texts": texts.to_dict(), "multiples": multiples}

    def measure() -> dict[str, Any]:
        by_multiple = {}
        for multiple in multiples:
            length = multiple * texts.window
            losses = measure_losses(model, texts.cut(length), [length], one_pass=reach.prefix_consistent)[length]
            inside = np.arange(1, length) % texts.window != 0  # mask over the tokens with a loss
            by_document = losses[:, inside].astype(np.float64).reshape(len(texts.documents.names), -1)
            by_multiple[str(multiple)] = by_document.mean(axis=1).tolist()
        return by_multiple

    return {key: np.array(row) for key, row in dict(store.value(named, measure)).items()}


def needles(model: Any, task: PasskeyTask, lengths: Mapping[str, int], trials: int, store: RunStore) -> dict[str, int]:
    """Return how many passkeys are found at each of `lengths` tokens, of `trials` at each of 5 depths."""
    named = {"what": "needles", "model": fingerprint(model), "lengths": dict(lengths), "trials": trials}

    def measure() -> dict[str, Any]:
        cells = {
            name: passkey_grid(model, task, lengths=[length], depths=DEPTHS, trials=trials)
            for name, length in lengths.items()
        }
        return {name: sum(cell.exact for cell in grid) for name, grid in cells.items()}

    return dict(store.value(named, measure))


def answers(
    model: Any, tokenizer: Any, task: str, lengths: Iterable[int], trials: int, store: RunStore
) -> dict[str, int]:
    """Return how many of `trials` examples of each length are answered fully right.

    If every token is the argmax after the right tokens, greedy decoding gives the right answer.

    Args:
        model: a causal model.
        tokenizer: of it, of bytes: examples of one length have as many tokens.
        task: of `TASKS`.
        lengths: letters.
        trials: examples of each.
        store: of what was measured.
    """
    length_list = [*lengths]
    named = {"what": "answers", "model": fingerprint(model), "task": task, "lengths": length_list, "trials": trials}

    def measure() -> dict[str, Any]:
        return {str(n): _right(Scorer(model), tokenizer, examples(task, trials, n, _SEED)) for n in length_list}

    assert task in TASKS
    return dict(store.value(named, measure))


def _right(scorer: Scorer, tokenizer: Any, test_examples: list[Example]) -> int:
    ids, count = tokens_of_answers(tokenizer, test_examples)
    predicted = scorer.last_logits(ids, count).argmax(-1)  # [trials, count]
    return int((predicted == ids[:, -count:].to(predicted.device)).all(dim=1).sum())
