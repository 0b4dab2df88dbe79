"""Runs all metrics on all models and compares the models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hf_posswap.comparison.against import against_base
from hf_posswap.comparison.measures import MEASURES
from hf_posswap.comparison.needles import why_no_needles
from hf_posswap.comparison.overall import ProgressEstimator, UnitCost
from hf_posswap.comparison.results import collect_results
from hf_posswap.comparison.sliding import against_sliding, measure_sliding, sliding_source
from hf_posswap.comparison.work import Work, planned_units
from hf_posswap.errors import DataError


def measure_all(works: Sequence[Work], lengths: Sequence[int], reference: str, command: str | None) -> dict[str, Any]:
    """Return the results of every measure on every model, as JSON.

    Args:
        works: one per model, in the order of the results.
        lengths: the requested lengths.
        reference: name of the baseline model.
        command: the command line, or None.

    Raises:
        NumericError, PositionRangeError, CheckpointError: as the measures.
    """
    reference_work = next(work for work in works if work.subject.name == reference)
    with _progress(works, reference_work):
        if why := why_no_needles(reference_work):
            _say(reference_work, f"passkey is not measured: {why}")
            for work in works:
                work.dropped["passkey"] = why
            _plan(works, reference_work)
        measured = {work.subject.name: _measure(work) for work in works}
        comparisons = {
            work.subject.name: against_base(reference_work, work) for work in works if work is not reference_work
        }
        sliding = None
        if (source := sliding_source(works, reference_work)) is not None:
            sliding, losses = measure_sliding(source, works)
            for work in works:
                if work.raw.get("losses") and (rows := against_sliding(losses, work)):
                    measured[work.subject.name]["against_sliding"] = rows
    return collect_results(works, reference_work, measured, comparisons, sliding, lengths, command)


def _progress(works: Sequence[Work], reference_work: Work) -> AbstractContextManager[object]:
    """Return a context that shows the progress of all units; a null context without a reporter."""
    if reference_work.reporter is None:
        return nullcontext()
    overall = ProgressEstimator(reference_work.reporter, reference_work.ranks.count)
    for work in works:
        work.overall = overall
    _plan(works, reference_work)
    return overall


def _plan(works: Sequence[Work], reference_work: Work) -> None:
    """Pass the missing units to the progress display, if there is one."""
    if reference_work.overall is None:
        return
    loads: dict[str, UnitCost] = {}
    for work in works:
        for metric in (name for name in work.metrics if name not in work.dropped):
            loads |= planned_units(work, MEASURES[metric])
    if (source := sliding_source(works, reference_work)) is not None:
        loads |= planned_units(source, lambda work: measure_sliding(work, works))
    reference_work.overall.plan(loads)


def _measure(work: Work) -> dict[str, Any]:
    """Return the result of each metric, and under "not_measured" why a metric does not apply to this subject."""
    metrics: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for metric in work.metrics:
        if metric in work.dropped:
            refused[metric] = work.dropped[metric]
            continue
        try:
            value = MEASURES[metric](work)
        except DataError as error:
            refused[metric] = str(error)
            _say(work, f"{work.subject.name}: {metric} is not measured: {error}")
            continue
        if value is not None:
            metrics[metric] = value
    if "ctx_gain" in metrics:
        far = work.raw["far_context"]
        metrics["far_context"] = None if far is None else dataclasses.asdict(far)
    return metrics | {"not_measured": refused}


def _say(work: Work, text: str) -> None:
    if work.reporter is not None:
        work.reporter.line(text)
