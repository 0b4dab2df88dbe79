"""Prepares the work on all candidates: loads every model, and checks lengths and documents before measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_posswap.comparison.candidates import Candidate, ModelLoader, Subject, make_subject
from hf_posswap.comparison.documents import EvalDocuments, read_documents
from hf_posswap.comparison.settings import EvalSettings
from hf_posswap.comparison.work import Work
from hf_posswap.errors import DataError, PositionRangeError
from hf_posswap.evaluation.memory import check_memory
from hf_posswap.evaluation.reach import reach_of
from hf_posswap.evaluation.store import RunStore
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.text.tokens import check_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MULTIPLES = (1, 2, 4, 8)


def prepare(
    chosen: Sequence[Candidate],
    names: Sequence[str],
    reference: str,
    tokenizer: PreTrainedTokenizerBase,
    documents: Any,
    column: str,
    settings: EvalSettings,
    store: RunStore,
    loader: ModelLoader,
) -> tuple[list[Work], tuple[int, ...]]:
    """Return the work on every candidate, in order, and the lengths. Everything is checked, nothing is measured.

    Args:
        chosen: the candidates; the first one determines the window and the default lengths.
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
    text = read_documents(documents, tokenizer, length=lengths[-1], limit=settings.documents, column=column)
    for subject in subjects:
        check_token_ids(subject.model, text.tokens)
    base = next(subject for subject in subjects if subject.name == reference)
    window = min(subjects[0].reach.window or lengths[0], lengths[-1])
    shared = (tokenizer, text, lengths, window, settings, store)
    return [_work(subject, None if subject is base else base, *shared) for subject in subjects], lengths


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


def _work(
    subject: Subject,
    base: Subject | None,
    tokenizer: PreTrainedTokenizerBase,
    text: EvalDocuments,
    lengths: tuple[int, ...],
    window: int,
    settings: EvalSettings,
    store: RunStore,
) -> Work:
    limit = subject.reach.limit
    runnable = tuple(n for n in lengths if limit is None or n <= limit)
    metrics = settings.metrics_for((base or subject).reach.causal)
    return Work(subject, base, tokenizer, text, runnable, window, metrics, settings, store)
