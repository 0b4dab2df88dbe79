"""Prepares the work on all candidates, runs all metrics on all models, and compares the models.

Every model is loaded, and lengths and documents are checked, before anything is measured. Models are compared with the
base, and with the sliding-window control: an unswapped model on long text. A swap to a longer reach pays off only if it
predicts better than the unswapped model that reads the same text in half-overlapping windows of its original size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.comparison.candidates import Candidate, ModelLoader, Subject, make_subject
from hf_posswap.comparison.documents import read_documents
from hf_posswap.comparison.measures import MEASURES, keep_prefixes, why_no_needles
from hf_posswap.comparison.report.results import Results
from hf_posswap.comparison.results import collect_results
from hf_posswap.comparison.settings import EvalSettings
from hf_posswap.comparison.work import (
    ProgressEstimator,
    Unit,
    UnitCost,
    Work,
    document_losses,
    planned_units,
    window_reader,
)
from hf_posswap.errors import DataError, PositionRangeError
from hf_posswap.evaluation.cost import check_memory
from hf_posswap.evaluation.losses import sliding_document, sliding_reads
from hf_posswap.evaluation.perplexity import loss_by_position, perplexity_by_length
from hf_posswap.evaluation.scoring import reach_of
from hf_posswap.evaluation.statistics import holm_corrected, mcnemar_p, paired_change
from hf_posswap.evaluation.store import RunStore
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.text.tokens import check_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MULTIPLES = (1, 2, 4, 8)
_LONG_OPERATIONS = 1e13
"""Floating-point operations from which a run is estimated before it starts: two minutes of a CPU core."""
_SAID_SECONDS, _HOUR = 60.0, 3600.0
_FEW_TRIALS, _FEW_DOCUMENTS = 2, 8  # as few documents give verdicts


def prepare(
    chosen: Sequence[Candidate],
    names: Sequence[str],
    reference: str,
    tokenizer: PreTrainedTokenizerBase,
    documents: object,
    column: str,
    settings: EvalSettings,
    store: RunStore,
    loader: ModelLoader,
) -> tuple[list[Work], tuple[int, ...]]:
    """Return the work on every candidate, in order, and the lengths. Everything is checked, nothing is measured.

    Args:
        chosen: the candidates; the first one determines the default lengths.
        names: the candidates' names.
        reference: name of the baseline.
        tokenizer: the tokenizer of all candidates.
        documents: as in `hf_posswap.compare`.
        column: as in `hf_posswap.compare`.
        settings: as in `hf_posswap.compare`.
        store: the store of finished units.
        loader: loads models.

    Raises:
        CheckpointError, DataError, PositionRangeError, NotEnoughMemoryError: as `hf_posswap.compare`.
    """
    lengths = tuple(sorted(set(settings.lengths or _multiples(chosen[0], loader))))
    subjects = _open_all(chosen, names, lengths, loader)
    lengths = _runnable(subjects, lengths, are_requested=settings.lengths is not None)
    base = next(subject for subject in subjects if subject.name == reference)
    count, begin = settings.documents, base.reach.causal
    text = read_documents(documents, tokenizer, length=lengths[-1], limit=count, column=column, begin=begin)
    for subject in subjects:
        check_token_ids(subject.model, text.tokens)
    window = min(window_reader(subjects, base).reach.window or lengths[0], lengths[-1])
    works = []
    for subject in subjects:
        limit, other = subject.reach.limit, None if subject is base else base
        runnable = tuple(n for n in lengths if limit is None or n <= limit)
        metrics = settings.metrics_for((other or subject).reach.causal)
        works.append(Work(subject, other, tokenizer, text, runnable, window, metrics, settings, store))
    return works, lengths


def _multiples(candidate: Candidate, loader: ModelLoader) -> tuple[int, ...]:
    """Return 1, 2, 4 and 8 times the original window of `candidate`."""
    window = reach_of(unwrap(loader.model(replace(candidate, scheme=None), 0))).window
    if window < 2:
        raise DataError(f"{candidate.label} has no known original window: give lengths.")
    return tuple(multiple * window for multiple in _MULTIPLES)


def _open_all(
    chosen: Sequence[Candidate], names: Sequence[str], lengths: tuple[int, ...], loader: ModelLoader
) -> list[Subject]:
    """Load every candidate, and refuse lengths that do not fit into memory before anything is run."""
    subjects = []
    for name, candidate in zip(names, chosen, strict=True):
        subject = make_subject(name, loader.model(candidate, lengths[-1]), lengths[-1])
        longest = max(
            (n for n in lengths if subject.reach.limit is None or n <= subject.reach.limit), default=lengths[0]
        )
        check_memory(subject.model, longest, prefill=subject.identity["prefill"])
        subjects.append(subject)
    return subjects


def _runnable(subjects: list[Subject], lengths: tuple[int, ...], *, are_requested: bool) -> tuple[int, ...]:
    """Return the lengths that at least one subject can run; raise if a requested length is not among them."""
    limits = {subject.name: subject.reach.limit for subject in subjects}
    most = None if None in limits.values() else max(limit for limit in limits.values() if limit is not None)
    runnable = tuple(n for n in lengths if most is None or n <= most)
    beyond = [n for n in lengths if n not in runnable]
    if (beyond and are_requested) or not runnable:
        ends = ", ".join(f"{name} at {limit}" for name, limit in limits.items())
        raise PositionRangeError(
            f"no model can run {beyond} tokens. Limits: {ends}. Measure shorter lengths, or swap with a larger "
            "max_length."
        )
    unable = [s.name for s in subjects if s.reach.limit is not None and s.reach.limit < runnable[0]]
    if unable:
        raise PositionRangeError(
            f"{', '.join(unable)} cannot run even {runnable[0]} tokens: measure a shorter length too."
        )
    return runnable


def against_base(base: Work, other: Work) -> dict[str, object]:
    """Return the differences of `other` from `base` at all common lengths: losses, needles and tasks.

    The p-values of the losses have Holm's correction.

    Args:
        base: the measured baseline.
        other: the other model, measured on the same documents.
    """
    differences: dict[str, object] = {}
    if base.raw.get("losses") and other.raw.get("losses"):
        rows = []
        for length in sorted(set(base.lengths) & set(other.lengths)):
            before, after = (document_losses(work, length).sum(axis=1, dtype=np.float64) for work in (base, other))
            change = paired_change(before, after, np.full(len(before), length - 1), seed=base.settings.seed)
            rows.append({"length": length} | dataclasses.asdict(change))
        differences["lengths"] = holm_corrected(rows)
    if "passkey" in base.raw and "passkey" in other.raw:
        differences["passkey"] = _needles(base.raw["passkey"], other.raw["passkey"])
    if "ruler_lite" in base.raw and "ruler_lite" in other.raw:
        differences["ruler_lite"] = _tasks(base.raw["ruler_lite"], other.raw["ruler_lite"], base.settings.seed)
    return differences


def _needles(before: dict[Any, bool], after: dict[object, bool]) -> dict[str, object] | None:
    """Return the exact McNemar test over the needles that both models were tested on; None without any."""
    both = sorted(set(before) & set(after))
    if not both:
        return None
    old, new = [before[key] for key in both], [after[key] for key in both]
    return {"needles": len(both), "before": sum(old), "after": sum(new), "p": mcnemar_p(old, new)}


def _tasks(before: dict[Any, float], after: dict[Any, float], seed: int) -> list[dict[str, object]]:
    """Return, for each common length, both mean scores over the same prompts, their difference, and what is kept.

    `kept` is the percentage of the base's score (also called retention), None where the base answers nothing. The
    interval is that of the difference, over prompts.
    """
    rows = []
    for length in sorted({key[0] for key in before} & {key[0] for key in after}):
        prompts = sorted(key for key in before if key[0] == length and key in after)
        old, new = (np.array([scores[key] for key in prompts]) for scores in (before, after))
        change = paired_change(old, new, np.ones(len(prompts)), seed=seed)
        ends = {"difference": change.difference, "low": change.low, "high": change.high, "p": change.p}
        kept = float(100 * new.mean() / old.mean()) if old.any() else None
        scores = {"score": float(new.mean()), "base_score": float(old.mean()), "kept": kept}
        rows.append({"length": length, "prompts": len(prompts)} | scores | ends)
    return rows


def sliding_source(works: Sequence[Work], reference: Work) -> Work | None:
    """Return the work on the model that reads sliding windows: the control, an unswapped model, or the reference.

    Returns None if perplexity by length is not requested, no length exceeds the window, or the model cannot run it.
    """
    reader = window_reader([work.subject for work in works], reference.subject)
    source = next(work for work in works if work.subject is reader)
    longest, limit = max(max(work.lengths) for work in works), source.subject.reach.limit
    window = source.window
    reads = source.subject.scoring is not None and 2 <= window < longest and (limit is None or window <= limit)
    return source if reads and "ppl_prefix" in source.metrics else None


def _sliding_values(work: Work, length: int) -> list[np.ndarray]:
    """Return the losses of each document, float32 [length - 1]; those of the first window are measured by then."""
    window, documents = work.window, work.documents
    known = work.subject.reach.prefix_consistent and window <= max(work.lengths)
    first = document_losses(work, window) if known and work.planned is None else None
    units = [
        Unit(
            {"metric": "sliding", "window": window, "first": "of the whole text" if known else "alone"},
            {"document": digest, "length": length},
            partial(sliding_document, work.subject.scorer, text, window, None if first is None else first[number]),
            sliding_reads(length, window)[known:],
            np.mean,
        )
        for number, (digest, text) in enumerate(zip(documents.digests, documents.tokens[:, :length], strict=True))
    ]
    return work.values("sliding window", units)


def measure_sliding(source: Work, works: Sequence[Work]) -> tuple[dict[str, object], np.ndarray]:
    """Return the results entry of the sliding window, and its losses, [N, longest length - 1].

    Args:
        source: the work on the model that reads windows.
        works: the work on all models, whose lengths beyond the window are measured.
    """
    lengths = sorted({length for work in works for length in work.lengths if length >= source.window})
    losses = np.stack(_sliding_values(source, max(lengths)))
    seed = source.settings.seed
    positions = [dataclasses.asdict(score) for score in loss_by_position(losses, seed=seed)]
    by_length = {length: losses[:, : length - 1] for length in lengths}
    summary = {
        "name": f"{source.subject.name}, sliding window",
        "of": source.subject.name,
        "window": source.window,
        "stride": source.window // 2,
        "ppl_prefix": [dataclasses.asdict(score) for score in perplexity_by_length(by_length, seed=seed)],
        "nll_pos": [row for row in positions if row["stop"] >= source.window],  # below, it equals the model itself
    }
    return summary, losses


def against_sliding(losses: np.ndarray, work: Work) -> list[dict[str, object]]:
    """Return the differences of a model from the sliding window, one row per length beyond the window.

    Args:
        losses: losses of the sliding window, from `measure_sliding`.
        work: the work on the model, measured on the same documents.
    """
    rows = []
    for length in (n for n in work.lengths if n > work.window):
        before = losses[:, : length - 1].sum(axis=1, dtype=np.float64)
        after = document_losses(work, length).sum(axis=1, dtype=np.float64)
        change = paired_change(before, after, np.full(len(before), length - 1), seed=work.settings.seed)
        rows.append({"length": length} | dataclasses.asdict(change))
    return holm_corrected(rows)


def measure_all(works: Sequence[Work], lengths: Sequence[int], reference: str, command: str | None) -> Results:
    """Return the results of every measure on every model, as JSON.

    Args:
        works: one per model, in the order of the results.
        lengths: the requested lengths.
        reference: name of the baseline model.
        command: the command line, or None.

    Raises:
        NumericError, PositionRangeError, CheckpointError: as the measures.
    """
    base = next(work for work in works if work.subject.name == reference)
    keep_prefixes(works, base)
    with _progress(works, base):
        if why := why_no_needles(base):
            _say(base, f"passkey is not measured: {why}")
            for work in works:
                work.dropped["passkey"] = why
            _plan(works, base)
        measured = {}
        for work in works:
            measured[work.subject.name] = _measure(work)
            if work is not base and work.subject.scoring is not None:
                work.subject.scoring.prefixes = None  # it compares no other model
        comparisons = {work.subject.name: against_base(base, work) for work in works if work is not base}
        sliding = None
        if (source := sliding_source(works, base)) is not None:
            sliding, losses = measure_sliding(source, works)
            for work in works:
                if work.raw.get("losses") and (rows := against_sliding(losses, work)):
                    measured[work.subject.name]["against_sliding"] = rows
    return collect_results(works, base, measured, comparisons, sliding, lengths, command)


def _progress(works: Sequence[Work], reference_work: Work) -> AbstractContextManager[object]:
    """Return a context that shows the progress of all units; a null context without a reporter."""
    if reference_work.reporter is None:
        return nullcontext()
    overall = ProgressEstimator(reference_work.reporter, reference_work.ranks.count)
    for work in works:
        work.overall = overall
    loads = _plan(works, reference_work)
    operations = sum(load.operations for metric_loads in loads.values() for load in metric_loads.values())
    if operations >= _LONG_OPERATIONS and reference_work.subject.scoring is not None:
        ids = torch.from_numpy(reference_work.documents.tokens[:1, : min(reference_work.lengths)].astype(np.int64))
        overall.calibrate(reference_work.subject, ids)
        seconds = {
            metric: overall.speed.seconds(list(metric_loads.values())) / overall.share
            for metric, metric_loads in loads.items()
        }
        for line in forecast(seconds, reference_work, overall.total, len(works)):
            _say(reference_work, line)
    return overall


def forecast(seconds: Mapping[str, float], work: Work, units: int, models: int) -> list[str]:
    """Return how long a run will take, by metric; and if that is more than an hour, how it takes less.

    Args:
        seconds: estimated seconds of all units, by metric.
        work: the work on the baseline.
        units: number of units.
        models: number of models.
    """
    settings, total = work.settings, sum(seconds.values())
    if total < _SAID_SECONDS:
        return []
    longest = sorted(seconds, key=lambda metric: -seconds[metric])
    shares = ", ".join(f"{metric} {duration(seconds[metric])}" for metric in longest if seconds[metric] >= total / 20)
    lines = [f"{units:,} units of {models} model{'s' * (models > 1)} take about {duration(total)} here: {shares}."]
    if total < _HOUR:
        return lines
    prompts = sum(seconds.get(metric, 0.0) for metric in ("passkey", "ruler_lite"))
    read, count = total - prompts, len(work.documents.tokens)
    savings = {
        f"trials {_FEW_TRIALS} instead of {settings.trials}": prompts * (1 - _FEW_TRIALS / settings.trials),
        f"documents {_FEW_DOCUMENTS} instead of {count}": read * (1 - _FEW_DOCUMENTS / count),
    }
    if perplexity := next((metric for metric in seconds if "ppl_prefix" in metric), None):
        alone = seconds[perplexity] + seconds.get("sliding window", 0.0)
        savings[f"metrics {perplexity} alone"] = total - alone
    ways = [f"{way} (about {duration(total - saved)})" for way, saved in savings.items() if saved >= 0.1 * total]
    lines.append(f"To take less, give {', or '.join([*ways, 'shorter lengths'])}.")
    if work.store.folder is None:
        lines.append("Nothing is kept if it is stopped: give an output folder, from which the same call resumes.")
    return lines


def duration(seconds: float) -> str:
    """Return seconds as text, rounded.

    Example:
        >>> duration(42.3), duration(600), duration(20000)
        ('42 seconds', '10 minutes', '5.6 hours')
    """
    for size, unit in ((_HOUR, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}" if unit == "hours" else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _plan(works: Sequence[Work], reference_work: Work) -> dict[str, dict[str, UnitCost]]:
    """Return the missing units by the metrics that need them, and pass them to the progress display, if there is one.

    Units that several metrics need are under the names of all of them, such as "ppl_prefix and nll_pos".
    """
    if reference_work.overall is None:
        return {}
    loads: dict[str, UnitCost] = {}
    needed_by: dict[str, dict[str, None]] = {}  # ordered sets
    for work in works:
        for metric in (name for name in work.metrics if name not in work.dropped):
            units = planned_units(work, MEASURES[metric])
            loads |= units
            for key in units:
                needed_by.setdefault(key, {})[metric] = None
    if (source := sliding_source(works, reference_work)) is not None:
        units = planned_units(source, lambda work: measure_sliding(work, works))
        loads |= units
        needed_by |= {key: {"sliding window": None} for key in units}
    reference_work.overall.plan(loads)
    by_metrics: dict[str, dict[str, UnitCost]] = {}
    for key, metrics in needed_by.items():
        by_metrics.setdefault(" and ".join(metrics), {})[key] = loads[key]
    return by_metrics


def _measure(work: Work) -> dict[str, object]:
    """Return the result of each metric, and under "not_measured" why a metric does not apply to this subject."""
    metrics = {}
    refused: dict[str, str] = {}
    for metric in work.metrics:
        if metric in work.dropped:
            refused[metric] = work.dropped[metric]
            continue
        try:
            value = MEASURES[metric](work)
        except (DataError, PositionRangeError) as error:
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
