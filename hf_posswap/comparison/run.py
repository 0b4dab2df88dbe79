"""`evaluate` and `compare`: from models and text to results, resumable, every number with its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.comparison.against import against_base
from hf_posswap.comparison.candidates import Candidate, Opening, Subject, make_subject
from hf_posswap.comparison.documents import TEXT, EvalDocuments, check_paths, read_documents
from hf_posswap.comparison.measures import MEASURES
from hf_posswap.comparison.pictures import draw_pictures, require_pictures
from hf_posswap.comparison.ranks import Ranks, open_ranks
from hf_posswap.comparison.results import collect_results, write_results
from hf_posswap.comparison.settings import EvalSettings
from hf_posswap.comparison.tokenizers import tokenizer_for
from hf_posswap.comparison.work import Work
from hf_posswap.errors import DataError, PositionRangeError
from hf_posswap.evaluation.memory import check_memory
from hf_posswap.evaluation.reach import reach_of
from hf_posswap.evaluation.store import RunStore
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.text.tokens import check_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_posswap.schemes.base import Scheme
    from hf_posswap.utils.progress import Reporter

_MULTIPLES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Evaluation:
    """What was found.

    Attributes:
        results: all of it, as results.json has it.
        folder: where it was written, or None.
        computed: units that were measured now; the others were found from an earlier run.
    """

    results: dict[str, Any]
    folder: Path | None
    computed: int

    def __str__(self) -> str:
        from hf_posswap.comparison.tables import markdown

        return markdown(self.results)


def evaluate(
    model: PreTrainedModel | str | Path,
    scheme: Scheme | str | None = None,
    *,
    base: PreTrainedModel | str | Path | None = None,
    documents: Any = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    out: str | Path | None = None,
    settings: EvalSettings | None = None,
    max_length: int | None = None,
    pictures: bool = True,
    alone: bool = False,
    reporter: Reporter | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Evaluation:
    """Return what `model` does at every length: perplexity, use of context, needles, and what the swap cost.

    Args:
        model: a transformers model (which stays as it is), a folder, or a Hub id.
        scheme: to put in first, without training; the model without it is then the base.
        base: what the model is held against; None: the model without `scheme`, or nothing.
        documents: as in `hf_posswap.comparison.read_documents`; None: the running Python's own text.
        tokenizer: of the model; None: that of the folder or Hub id.
        out: a folder for results.json, tables, and finished units, from which the same call goes on after a stop.
        settings: what to measure; None: the defaults of `EvalSettings`.
        max_length: tokens that `scheme` is meant for; None: the longest length that is measured.
        pictures: whether to draw them where `out` is given.
        alone: as in `compare`.
        reporter: of progress; None: silent.
        trust_remote_code: as in `compare`.
        options: fields of `scheme`, where it is given by name.

    Raises:
        CheckpointError: a model cannot be loaded, or `out` cannot be written or is in use.
        DataError: documents or tokenizer do not fit; the message says why.
        PositionRangeError: no model runs one of the lengths.
        NotEnoughMemoryError: a length does not fit into memory; the message says what it needs.
        NumericError: a loss is not finite; what was measured before is kept.
        OptionError, SchemeError, UnsupportedSwapError: as `patch_model`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.training import byte_tokenizer
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
        >>> settings = EvalSettings(lengths=(16, 32), metrics=("ppl_prefix",), documents=2)
        >>> found = evaluate(model, "rope", tokenizer=byte_tokenizer(), settings=settings).results
        >>> [(name, len(model["ppl_prefix"])) for name, model in found["models"].items()]
        [('GPT2LMHeadModel', 1), ('GPT2LMHeadModel+rope', 2)]
    """
    chosen = Candidate(model, scheme, options, max_length)
    if base is None and scheme is not None:
        base = model
    first = [] if base is None else [Candidate(base)]
    if first and first[0].label == chosen.label:
        first = [replace(first[0], name="base")]
    return compare(
        [*first, chosen],
        documents=documents,
        tokenizer=tokenizer,
        out=out,
        settings=settings,
        pictures=pictures,
        alone=alone,
        reporter=reporter,
        trust_remote_code=trust_remote_code,
    )


def compare(
    candidates: Sequence[Candidate | PreTrainedModel | str | Path],
    *,
    documents: Any = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    out: str | Path | None = None,
    settings: EvalSettings | None = None,
    column: str = TEXT,
    device: Any = None,
    dtype: Any = None,
    pictures: bool = True,
    alone: bool = False,
    reporter: Reporter | None = None,
    trust_remote_code: bool = False,
) -> Evaluation:
    """Return what several models do on the same tokens, each held against the first.

    Where a launcher such as `accelerate launch` or `torchrun` started several processes, they share the documents and
    the prompts; all of them return the same, and the main one writes it.

    Args:
        candidates: models, folders, Hub ids, or `Candidate`s that put a scheme into one of them.
        documents: as in `evaluate`.
        tokenizer: of all of them; None: that of the first folder or Hub id.
        out: as in `evaluate`.
        settings: as in `evaluate`.
        column: of text, where documents are rows.
        device: to run loaded models on; None: the CPU, or what a launch of several processes gives each.
        dtype: to load models in; None: float32 on the CPU, elsewhere that of the checkpoint.
        pictures: whether to draw them where `out` is given.
        alone: whether this process measures by itself, although a launcher started others: as it must where they do
            not call this function too.
        reporter: of progress; None: silent.
        trust_remote_code: run code that a folder or Hub id brings, where a model or a tokenizer needs that.

    Raises:
        DataError: no candidates, two of one name, or tokenizers that differ; and as `evaluate`.
        MissingDependencyError: pictures are wanted and matplotlib is not installed, or several processes were started
            and accelerate is not.
        CheckpointError, PositionRangeError, NotEnoughMemoryError, NumericError: as `evaluate`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.training import byte_tokenizer
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
        >>> settings = EvalSettings(lengths=(16,), metrics=("ppl_prefix",), documents=2)
        >>> sweep = [Candidate(model, name="base"), Candidate(model, "rope"), Candidate(model, "alibi")]
        >>> list(compare(sweep, tokenizer=byte_tokenizer(), settings=settings).results["comparisons"])
        ['GPT2LMHeadModel+rope', 'GPT2LMHeadModel+alibi']
    """
    chosen = [c if isinstance(c, Candidate) else Candidate(c) for c in candidates]
    names = [candidate.label for candidate in chosen]
    if not chosen or len(set(names)) < len(names):
        raise DataError(f"a comparison needs models with names of their own, got {names}: set Candidate(name=...).")
    settings, folder = settings or EvalSettings(), None if out is None else Path(out).expanduser()
    if folder is not None and pictures:
        require_pictures()
    check_paths(documents)
    words = tokenizer_for(chosen, tokenizer, trust_remote_code=trust_remote_code)
    ranks = open_ranks(alone=alone)
    opening = Opening({}, ranks.device if device is None else device, dtype, trust_remote_code)
    with _open_store(folder, ranks) as store:  # before weights are loaded: it may be in use
        works, lengths = ranks.agree(
            lambda: _prepare(chosen, names, words, documents, column, settings, store, opening)
        )
        for work in works:
            work.ranks, work.reporter = ranks, reporter if ranks.is_main else None
        measured = {work.subject.name: _measure(work) for work in works}
        against = {work.subject.name: against_base(works[0], work) for work in works[1:]}
        results = collect_results(works, measured, against, lengths)
        if folder is not None:
            ranks.agree(lambda: _write(results, folder, pictures) if ranks.is_main else None)
        return Evaluation(results, folder, sum(ranks.gather(store.computed)))


def _open_store(folder: Path | None, ranks: Ranks) -> RunStore:
    """Return the store of this process. The main one opens first: it refuses a folder in use, and mends torn lines."""
    store = ranks.agree(lambda: RunStore(folder) if ranks.is_main else None)
    other = ranks.agree(lambda: None if ranks.is_main else RunStore(folder, ranks.index))
    return store or other or RunStore(folder)


def _write(results: dict[str, Any], folder: Path, pictures: bool) -> None:
    write_results(results, folder)
    if pictures:
        draw_pictures(results, folder)


def _prepare(
    chosen: list[Candidate],
    names: list[str],
    words: PreTrainedTokenizerBase,
    documents: Any,
    column: str,
    settings: EvalSettings,
    store: RunStore,
    opening: Opening,
) -> tuple[list[Work], tuple[int, ...]]:
    """Return the work on every candidate, the base first, and the lengths: all checked, nothing measured."""
    lengths = tuple(sorted(set(settings.lengths or _multiples(chosen[0], opening))))
    subjects = _open_all(chosen, names, lengths, opening)
    lengths = _runnable(subjects, lengths, asked=settings.lengths is not None)
    text = read_documents(documents, words, length=lengths[-1], limit=settings.documents, column=column)
    for subject in subjects:
        check_token_ids(subject.model, text.tokens)
    return [_work(subject, subjects[0], words, text, lengths, settings, store) for subject in subjects], lengths


def _multiples(candidate: Candidate, opening: Opening) -> tuple[int, ...]:
    """Return 1, 2, 4 and 8 times the original window of `candidate`."""
    window = reach_of(unwrap(opening.model(replace(candidate, scheme=None), 0))).window
    if window < 2:
        raise DataError(f"{candidate.label} does not say how long its original window is: give lengths.")
    return tuple(multiple * window for multiple in _MULTIPLES)


def _open_all(chosen: list[Candidate], names: list[str], lengths: tuple[int, ...], opening: Opening) -> list[Subject]:
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
    first: Subject,
    words: PreTrainedTokenizerBase,
    text: EvalDocuments,
    lengths: tuple[int, ...],
    settings: EvalSettings,
    store: RunStore,
) -> Work:
    limit = subject.reach.limit
    own = tuple(n for n in lengths if limit is None or n <= limit)
    base = None if subject is first else first
    window = min(first.reach.window or lengths[0], lengths[-1])
    metrics = settings.metrics_for(first.reach.causal)
    return Work(subject, base, words, text, own, window, metrics, settings, store)


def _measure(work: Work) -> dict[str, Any]:
    """Return what each metric found; under "not_measured" why one does not apply to this subject."""
    found: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for metric in work.metrics:
        try:
            value = MEASURES[metric](work)
        except DataError as error:
            refused[metric] = str(error)
            if work.reporter is not None:
                work.reporter.line(f"{work.subject.name}: {metric} is not measured: {error}")
            continue
        if value is not None:
            found[metric] = value
    return found | {"not_measured": refused}
