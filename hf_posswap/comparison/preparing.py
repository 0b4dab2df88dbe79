"""From candidates to work: every model opened, every length and document checked, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_posswap.comparison.candidates import Candidate, Opening, Subject, make_subject
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
    words: PreTrainedTokenizerBase,
    documents: Any,
    column: str,
    settings: EvalSettings,
    store: RunStore,
    opening: Opening,
) -> tuple[list[Work], tuple[int, ...]]:
    """Return the work on every candidate, in their order, and the lengths: all checked, nothing measured.

    Args:
        chosen: the candidates; the window, and lengths that were not asked for, are those of the first.
        names: of them.
        reference: name of the one that the others are held against.
        words: the tokenizer.
        documents: as in `hf_posswap.compare`.
        column: likewise.
        settings: likewise.
        store: of finished units.
        opening: loads models.

    Raises:
        CheckpointError, DataError, PositionRangeError, NotEnoughMemoryError: as `hf_posswap.compare`.
    """
    lengths = tuple(sorted(set(settings.lengths or _multiples(chosen[0], opening))))
    subjects = _open_all(chosen, names, lengths, opening)
    lengths = _runnable(subjects, lengths, asked=settings.lengths is not None)
    text = read_documents(documents, words, length=lengths[-1], limit=settings.documents, column=column)
    for subject in subjects:
        check_token_ids(subject.model, text.tokens)
    held = next(subject for subject in subjects if subject.name == reference)
    window = min(subjects[0].reach.window or lengths[0], lengths[-1])
    shared = (words, text, lengths, window, settings, store)
    return [_work(subject, None if subject is held else held, *shared) for subject in subjects], lengths


def _multiples(candidate: Candidate, opening: Opening) -> tuple[int, ...]:
    """Return 1, 2, 4 and 8 times the original window of `candidate`."""
    window = reach_of(unwrap(opening.model(replace(candidate, scheme=None), 0))).window
    if window < 2:
        raise DataError(f"{candidate.label} does not say how long its original window is: give lengths.")
    return tuple(multiple * window for multiple in _MULTIPLES)


def _open_all(
    chosen: Sequence[Candidate], names: Sequence[str], lengths: tuple[int, ...], opening: Opening
) -> list[Subject]:
    """Return every candidate ready, and refuse lengths for which there is no memory before anything is run."""
    subjects = []
    for name, candidate in zip(names, chosen, strict=True):
        subject = make_subject(name, opening.model(candidate, lengths[-1]), lengths[-1])
        most = max((n for n in lengths if subject.reach.limit is None or n <= subject.reach.limit), default=lengths[0])
        check_memory(subject.model, most, prefill=subject.identity["prefill"])
        subjects.append(subject)
    return subjects


def _runnable(subjects: list[Subject], lengths: tuple[int, ...], *, asked: bool) -> tuple[int, ...]:
    """Return the lengths that some subject runs; those asked for must all be among them."""
    limits = {subject.name: subject.reach.limit for subject in subjects}
    most = None if None in limits.values() else max(limit for limit in limits.values() if limit is not None)
    kept = tuple(n for n in lengths if most is None or n <= most)
    beyond = [n for n in lengths if n not in kept]
    if (beyond and asked) or not kept:
        ends = ", ".join(f"{name} at {limit}" for name, limit in limits.items())
        raise PositionRangeError(
            f"no model runs {beyond} tokens: {ends} end there. Measure shorter lengths, or swap with a larger "
            "max_length."
        )
    unable = [s.name for s in subjects if s.reach.limit is not None and s.reach.limit < kept[0]]
    if unable:
        raise PositionRangeError(f"{', '.join(unable)} cannot run even {kept[0]} tokens: measure a shorter length too.")
    return kept


def _work(
    subject: Subject,
    base: Subject | None,
    words: PreTrainedTokenizerBase,
    text: EvalDocuments,
    lengths: tuple[int, ...],
    window: int,
    settings: EvalSettings,
    store: RunStore,
) -> Work:
    limit = subject.reach.limit
    own = tuple(n for n in lengths if limit is None or n <= limit)
    metrics = settings.metrics_for((base or subject).reach.causal)
    return Work(subject, base, words, text, own, window, metrics, settings, store)
