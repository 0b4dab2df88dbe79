"""`evaluate` and `compare`: measure models on text, resumable, with uncertainties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.comparison.candidates import Candidate, ModelLoader
from hf_posswap.comparison.documents import TEXT, check_paths
from hf_posswap.comparison.measuring import measure_all
from hf_posswap.comparison.names import candidate_names, reference_name
from hf_posswap.comparison.pictures import draw_pictures, require_pictures
from hf_posswap.comparison.preparing import prepare
from hf_posswap.comparison.ranks import Ranks, open_ranks
from hf_posswap.comparison.results import keep_date, write_results
from hf_posswap.comparison.settings import EvalSettings
from hf_posswap.comparison.tokenizers import tokenizer_for
from hf_posswap.errors import CheckpointError
from hf_posswap.evaluation.longppl import KeySpans
from hf_posswap.evaluation.store import RunStore
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.printable import printable_lines
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_posswap.schemes.base import Scheme
    from hf_posswap.utils.progress import Reporter


@dataclass(frozen=True)
class Evaluation:
    """The results of `evaluate` or `compare`. `print` shows them as Markdown, a notebook as tables.

    Attributes:
        results: all results, as in results.json.
        folder: the output folder, or None.
        computed: number of units measured in this run; the others come from an earlier run.
    """

    results: dict[str, Any]
    folder: Path | None
    computed: int

    def __str__(self) -> str:
        from hf_posswap.comparison.tables import markdown

        return printable_lines(markdown(self.results))

    def _repr_html_(self) -> str:
        from hf_posswap.comparison.tables import notebook

        return notebook(self.results)


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
    """Measure `model` at every length: perplexity, use of context, needles, and the cost of the swap.

    Args:
        model: a transformers model (which is not changed), a folder, or a Hub id.
        scheme: the scheme to put in first, without training; the model without it is then the base.
        base: the baseline; None: the model without `scheme`, or nothing.
        documents: as in `hf_posswap.comparison.read_documents`; None: the running Python's own text.
        tokenizer: the model's tokenizer; None: that of the folder or Hub id.
        out: a folder for results.json, tables, and finished units, from which the same call resumes after a stop.
        settings: what to measure; None: the defaults of `EvalSettings`.
        max_length: tokens that `scheme` should support; None: the longest measured length.
        pictures: whether to draw pictures if `out` is given.
        alone: as in `compare`.
        reporter: shows progress; None: silent.
        trust_remote_code: as in `compare`.
        options: fields of a `scheme` given by name.

    Raises:
        CheckpointError: a model cannot be loaded, or `out` cannot be written or is in use.
        DataError: documents or tokenizer do not fit; the message says why.
        PositionRangeError: no model can run one of the lengths.
        NotEnoughMemoryError: a length does not fit into memory; the message says what it needs.
        NumericError: a loss is not finite; earlier measurements are kept.
        OptionError, SchemeError, UnsupportedSwapError: as `patch_model`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.training import byte_tokenizer
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
        >>> settings = EvalSettings(lengths=(16, 32), metrics=("ppl_prefix",), documents=2)
        >>> results = evaluate(model, "rope", tokenizer=byte_tokenizer(), settings=settings).results
        >>> [(name, len(model["ppl_prefix"])) for name, model in results["models"].items()]
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
    against: str | None = None,
    command: str | None = None,
) -> Evaluation:
    """Measure several models on the same tokens, and compare each with a baseline and with the sliding window.

    Beyond the original window each causal model is also compared with the sliding-window control: the control, or an
    unswapped model, reading half-overlapping windows of the original size.

    If a launcher such as `accelerate launch` or `torchrun` starts several processes, they share the documents and the
    prompts; all of them return the same results, and the main process writes them.

    Args:
        candidates: models, folders, Hub ids, or `Candidate`s that put a scheme into one of them. By default a folder is
            named after its last component, and a training's `RUN/model` after the run. The first one determines the
            window and the default lengths.
        documents: as in `evaluate`.
        tokenizer: the tokenizer of all models; None: that of the first folder or Hub id.
        out: as in `evaluate`.
        settings: as in `evaluate`.
        column: the text column, if documents are rows.
        device: device of loaded models; None: the CPU, or the device that a launch assigns to each process.
        dtype: dtype of loaded models; None: float32 on the CPU, elsewhere that of the checkpoint.
        pictures: whether to draw pictures if `out` is given.
        alone: whether this process measures alone in a launch of several processes; required if the others do not call
            this function.
        reporter: shows progress; None: silent.
        trust_remote_code: run code that comes with a folder or Hub id if a model or a tokenizer needs it.
        against: name of the baseline; None: the model called "control", else the first.
        command: the command line to record in the results.

    Raises:
        UnknownNameError: no model is called `against`.
        DataError: no candidates, duplicate names, or different tokenizers; and as `evaluate`.
        MissingDependencyError: matplotlib is needed for pictures, or accelerate for several processes, and it is not
            installed.
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
    names = candidate_names(chosen)
    reference = reference_name(names, against)
    settings, folder = settings or EvalSettings(), None if out is None else expand_home(out)
    if folder is not None and pictures:
        require_pictures()
    check_paths(documents)
    _check_early(chosen, settings, folder)
    loaded_tokenizer = tokenizer_for(chosen, tokenizer, trust_remote_code=trust_remote_code)
    ranks = open_ranks(alone=alone)
    loader = ModelLoader({}, ranks.device if device is None else device, dtype, trust_remote_code)
    with _open_store(folder, ranks) as store:  # before weights are loaded, because it may be in use
        works, lengths = ranks.agree(
            lambda: prepare(chosen, names, reference, loaded_tokenizer, documents, column, settings, store, loader)
        )
        for work in works:
            work.ranks, work.reporter = ranks, reporter if ranks.is_main else None
        results = measure_all(works, lengths, reference, command)
        if folder is not None:
            ranks.agree(lambda: _write(results, folder, pictures) if ranks.is_main else None)
        return Evaluation(results, folder, sum(ranks.gather(store.computed)))


def _check_early(candidates: list[Candidate], settings: EvalSettings, folder: Path | None) -> None:
    """Check schemes, key spans and the folder before a tokenizer or a model is loaded."""
    for candidate in candidates:
        candidate.check()
    if settings.key_spans is not None:
        KeySpans.load(settings.key_spans)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cannot write to the folder {shown(folder)}: it is a file. Choose another.")


def _open_store(folder: Path | None, ranks: Ranks) -> RunStore:
    """Return the store of this process. The main process opens first: it checks the lock and repairs torn lines."""
    store = ranks.agree(lambda: RunStore(folder) if ranks.is_main else None)
    other = ranks.agree(lambda: None if ranks.is_main else RunStore(folder, ranks.index))
    return store or other or RunStore(folder)


def _write(results: dict[str, Any], folder: Path, pictures: bool) -> None:
    keep_date(results, folder)
    write_results(results, folder)
    if pictures:
        draw_pictures(results, folder)
