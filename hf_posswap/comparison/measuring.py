"""All that is measured of all models, and what they are to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hf_posswap.comparison.against import against_base
from hf_posswap.comparison.measures import MEASURES
from hf_posswap.comparison.needles import blind_to_needles
from hf_posswap.comparison.overall import Load, Overall
from hf_posswap.comparison.results import collect_results
from hf_posswap.comparison.sliding import against_sliding, measure_sliding, sliding_source
from hf_posswap.comparison.work import Work, planned_units
from hf_posswap.errors import DataError


def measure_all(works: Sequence[Work], lengths: Sequence[int], reference: str, command: str | None) -> dict[str, Any]:
    """Return the results of every measure on every model, as JSON.

    Args:
        works: of all models, in the order of the results.
        lengths: that were asked for.
        reference: name of the model that the others are held against.
        command: what asked for it, or None.

    Raises:
        NumericError, PositionRangeError, CheckpointError: as the measures.
    """
    held = next(work for work in works if work.subject.name == reference)
    with _progress(works, held):
        if why := blind_to_needles(held):
            _say(held, f"passkey is not measured: {why}")
            for work in works:
                work.dropped["passkey"] = why
            _plan(works, held)
        measured = {work.subject.name: _measure(work) for work in works}
        comparisons = {work.subject.name: against_base(held, work) for work in works if work is not held}
        sliding = None
        if (source := sliding_source(works, held)) is not None:
            sliding, losses = measure_sliding(source, works)
            for work in works:
                if work.raw.get("losses") and (rows := against_sliding(losses, work)):
                    measured[work.subject.name]["against_sliding"] = rows
    return collect_results(works, held, measured, comparisons, sliding, lengths, command)


def _progress(works: Sequence[Work], held: Work) -> AbstractContextManager[object]:
    """Return what shows the progress of all units while it is open; nothing where there is no reporter."""
    if held.reporter is None:
        return nullcontext()
    overall = Overall(held.reporter, held.ranks.count)
    for work in works:
        work.overall = overall
    _plan(works, held)
    return overall


def _plan(works: Sequence[Work], held: Work) -> None:
    """Tell the progress which units are to be done; without one, do nothing."""
    if held.overall is None:
        return
    loads: dict[str, Load] = {}
    for work in works:
        for metric in (name for name in work.metrics if name not in work.dropped):
            loads |= planned_units(work, MEASURES[metric])
    if (source := sliding_source(works, held)) is not None:
        loads |= planned_units(source, lambda work: measure_sliding(work, works))
    held.overall.plan(loads)


def _measure(work: Work) -> dict[str, Any]:
    """Return what each metric found; under "not_measured" why one does not apply to this subject."""
    found: dict[str, Any] = {}
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
            found[metric] = value
    if "ctx_gain" in found:
        far = work.raw["far_context"]
        found["far_context"] = None if far is None else dataclasses.asdict(far)
    return found | {"not_measured": refused}


def _say(work: Work, text: str) -> None:
    if work.reporter is not None:
        work.reporter.line(text)
