"""The passkey grid as a metric, and a check that the base finds passkeys within its own window."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hf_posswap.comparison.work import Unit, Work
from hf_posswap.errors import DataError
from hf_posswap.evaluation.eff_len import effective_length
from hf_posswap.evaluation.passkey import PasskeyTask, answer_prompt, passkey_keys
from hf_posswap.evaluation.statistics import wilson_interval
from hf_posswap.evaluation.store import unit_key


def why_no_needles(work: Work) -> str | None:
    """Return why a needle grid would be uninformative, or None: the model finds no passkey within its own window.

    Returns None if no prompt fits the window, or if the metric is requested by name.
    """
    if work.settings.metrics is not None or "passkey" not in work.metrics:
        return None
    task = _passkey_task(work)
    within = [n for n in work.lengths if task.shortest <= n <= work.window]
    if not within:
        return None
    answers = work.values(
        "passkey in the window", [_needle(work, task, *prompt_key) for prompt_key in _prompt_keys(work, within)]
    )
    if any(value["right"] for value in answers):
        return None
    return (
        f"{work.subject.name} finds none of {len(answers)} passkeys within its own {work.window:,} tokens, so a grid "
        "of longer prompts would be uninformative; request the metric passkey by name to measure it anyway."
    )


def measure_passkey(work: Work) -> dict[str, Any]:
    """Return the needle grid, one row per cell, and the effective length derived from it."""
    settings, task = work.settings, _passkey_task(work)
    lengths = [n for n in work.lengths if n >= task.shortest]
    if not lengths:
        raise DataError(f"the shortest passkey prompt takes {task.shortest} tokens; the lengths are {work.lengths}.")
    grid = [(length, depth) for length in lengths for depth in settings.depths]
    answers = iter(
        work.values("passkey", [_needle(work, task, *prompt_key) for prompt_key in _prompt_keys(work, lengths)])
    )
    cells: list[dict[str, Any]] = []
    right: dict[tuple[int, float, int], bool] = {}
    for length, depth in grid:
        cell_answers = [next(answers) for _ in range(settings.trials)]
        right |= {(length, depth, trial): value["right"] for trial, value in enumerate(cell_answers)}
        losses = [float(np.mean(value["nll"])) for value in cell_answers]
        cells.append(_cell(length, depth, [value["right"] for value in cell_answers], losses))
    work.raw["passkey"] = right
    by_length = {n: [is_right for (length, _, _), is_right in right.items() if length == n] for n in lengths}
    effective = dataclasses.asdict(
        effective_length({n: (sum(is_right), len(is_right)) for n, is_right in by_length.items()})
    )
    return {"header": task.header, "trials": settings.trials, "cells": cells, "effective_length": effective}


def _prompt_keys(work: Work, lengths: list[int]) -> list[tuple[int, float, int]]:
    """Return length, depth and passkey of each prompt."""
    settings = work.settings
    return [
        (length, depth, key)
        for length in lengths
        for depth in settings.depths
        for key in passkey_keys(settings.seed, length, depth, settings.trials)
    ]


def _needle(work: Work, task: PasskeyTask, length: int, depth: float, key: int) -> Unit:
    """Return one prompt as a unit. Its text is written on demand, because all prompts together take much memory."""

    def answer() -> dict[str, Any]:
        right, losses = answer_prompt(work.subject.scorer, *task.prompt(length=length, depth=depth, key=key))
        return {"right": right, "nll": losses.tolist()}

    ids, _ = task.prompt(length=length, depth=depth, key=key)
    unit_id = {"length": length, "depth": depth, "prompt": unit_key({"ids": ids})}
    return Unit({"metric": "passkey", "header": task.header}, unit_id, answer, (length,))


def _cell(length: int, depth: float, right: list[bool], losses: list[float]) -> dict[str, Any]:
    low, high = wilson_interval(sum(right), len(right))
    share = sum(right) / len(right)
    nll = float(np.mean(losses))
    return {"length": length, "depth": depth, "share": share, "low": low, "high": high, "answer_nll": nll}


def _passkey_task(work: Work) -> PasskeyTask:
    """Return the task, without its header if the window is too short for it; it is the same for every subject."""
    task = PasskeyTask(work.tokenizer)
    return task if task.shortest <= work.window else PasskeyTask(work.tokenizer, header=False)
