"""`evaluate` and `compare`: measure models on text, resumable, with uncertainties."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posswap.comparison.candidates import Candidate, ModelLoader, tokenizer_for
from hf_posswap.comparison.documents import TEXT, check_paths, text_and_count
from hf_posswap.comparison.measuring import measure_all, prepare
from hf_posswap.comparison.names import candidate_names, reference_name
from hf_posswap.comparison.pictures import draw_pictures, require_pictures
from hf_posswap.comparison.ranks import open_ranks
from hf_posswap.comparison.report.results import Results
from hf_posswap.comparison.results import keep_date, write_results
from hf_posswap.comparison.settings import EvalSettings, merge_settings
from hf_posswap.errors import CheckpointError, OptionError
from hf_posswap.evaluation.longppl import KeySpans
from hf_posswap.evaluation.store import RunStore
from hf_posswap.patching.plan.plan_swap import SchemeChoice, check_max_length
from hf_posswap.text.stdlib import PYTHON
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.devices import resolve_device, resolve_dtype
from hf_posswap.utils.printable import printable_lines
from hf_posswap.utils.progress import reporter_for
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_posswap.utils.progress import Reporter


@dataclass(frozen=True, repr=False)
class Evaluation(ResultView):
    """The results of `evaluate` or `compare`. `print` shows them as Markdown, a notebook as tables.

    Attributes:
        results: all results, as in results.json.
        folder: the output folder, or None.
        computed: number of units measured in this run; the others come from an earlier run.
    """

    results: Results
    folder: Path | None
    computed: int

    def _repr_facts(self) -> dict[str, object]:
        folder = None if self.folder is None else str(self.folder)
        return {
            "models": list(self.results["models"]),
            "lengths": self.results["lengths"],
            "metrics": self.results["metrics"],
            "folder": folder,
        }

    def __str__(self) -> str:
        from hf_posswap.comparison.tables import markdown

        return printable_lines(markdown(self.results))

    def _repr_html_(self) -> str:
        from hf_posswap.comparison.tables import notebook

        return notebook(self.results)


def evaluate(
    model: PreTrainedModel | str | Path,
    scheme: SchemeChoice | None = None,
    *,
    baseline: PreTrainedModel | str | Path | None = None,
    text: object = None,
    documents: object = None,
    lengths: Sequence[int] | int | None = None,
    metrics: Sequence[str] | str | None = None,
    trials: int | None = None,
    margin: float | None = None,
    key_spans: str | Path | None = None,
    seed: int | None = None,
    settings: EvalSettings | None = None,
    max_length: int | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    column: str = TEXT,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    out: str | Path | None = None,
    pictures: bool = True,
    alone: bool = False,
    progress: bool | None = None,
    reporter: Reporter | None = None,
    trust_remote_code: bool = False,
    **options: object,
) -> Evaluation:
    """Measure `model` at every length: perplexity, use of context, needles, and the cost of the swap.

    Args:
        model: a transformers model (which is not changed), a folder, or a Hub id.
        scheme: the scheme to put in first, without training, as in `patch_model`; the model without it is then the
            baseline.
        baseline: a model to compare with; None: the model without `scheme`, or nothing.
        text: as the source in `hf_posswap.comparison.read_documents`; "python": the running
            Python's own text; None: the same, with a warning.
        documents: maximum number of documents; None: 48. It also takes what `text` takes.
        lengths: lengths to measure, in tokens; None: 1, 2, 4 and 8 windows.
        metrics: names of what to measure, as in `EvalSettings`.
        trials: passkeys for each length and depth; None: 10.
        margin: nats per token that the short-context verdict tolerates; None: 0.02.
        key_spans: a file of key tokens for longppl.
        seed: seed of needles, bootstraps and permutations; None: 0. For a seed of the scheme, write it in its name:
            "kerple:seed=1".
        settings: further settings; those given by name replace them. None: the defaults of `EvalSettings`.
        max_length: tokens that `scheme` should support; None: the longest measured length, within the window as in
            `patch_model`.
        tokenizer: the model's tokenizer; None: that of the folder or Hub id, from which a model object was loaded too.
        column: the text column, if the text has rows.
        device: device of a loaded model, "auto", "cpu", "cuda:1", ...; None: "auto", a GPU if there is one. A model
            object stays where it is.
        dtype: dtype of a loaded model, "bfloat16", ...; None: float32 on the CPU, elsewhere that of the checkpoint.
        out: a folder for results.json, tables, and finished units, from which the same call resumes after a stop.
        pictures: whether to draw pictures if `out` is given.
        alone: as in `compare`.
        progress: show a bar over all units (documents, prompts and lengths of each metric); None: in a notebook and on
            a terminal, unless HF_HUB_DISABLE_PROGRESS_BARS or `disable_progress_bar` of transformers turns bars off.
        reporter: shows the progress instead, as the command line does.
        trust_remote_code: as in `compare`.
        options: fields of a `scheme` given by name.

    Raises:
        CheckpointError: a model cannot be loaded, or `out` cannot be written or is in use.
        DataError: documents or tokenizer do not fit; the message says why.
        PositionRangeError: no model can run one of the lengths.
        NotEnoughMemoryError: a length does not fit into memory; the message says what it needs.
        NumericError: a loss is not finite; earlier measurements are kept.
        OptionError, UnknownNameError: a setting is invalid; the message says what was expected.
        OptionError, SchemeError, UnsupportedSwapError: as `patch_model`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.training import byte_tokenizer
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
        >>> how = {"lengths": [16, 32], "metrics": "ppl_prefix", "text": "python", "documents": 2}
        >>> results = evaluate(model, "rope", tokenizer=byte_tokenizer(), **how).results
        >>> [(name, len(model["ppl_prefix"])) for name, model in results["models"].items()]
        [('GPT2LMHeadModel', 1), ('GPT2LMHeadModel+rope', 2)]
    """
    if scheme is None and (options or max_length is not None):
        _refuse_options(options, max_length)
    chosen = Candidate(model, scheme, options, max_length)
    text, documents = text_and_count(text, documents)
    if baseline is None and scheme is not None:
        baseline = model
    first = [] if baseline is None else [Candidate(baseline)]
    if first and first[0].label == chosen.label:
        first = [replace(first[0], name="base")]
    return compare(
        [*first, chosen],
        text=PYTHON if text is None else text,
        documents=documents,
        lengths=lengths,
        metrics=metrics,
        trials=trials,
        margin=margin,
        key_spans=key_spans,
        seed=seed,
        settings=settings,
        tokenizer=tokenizer,
        column=column,
        device=device,
        dtype=dtype,
        out=out,
        pictures=pictures,
        alone=alone,
        progress=progress,
        reporter=reporter,
        trust_remote_code=trust_remote_code,
    )


def _refuse_options(options: dict[str, object], max_length: int | None) -> None:
    """Raise an OptionError for arguments that say how to put in a scheme, or are misspelt, where there is no scheme."""
    names = [*options, *([] if max_length is None else ["max_length"])]
    known = list(inspect.signature(evaluate).parameters)
    near = {name: difflib.get_close_matches(name, known, n=1) for name in options}
    hints = [f"Did you mean {match[0]!r}?" for match in near.values() if match]
    raise OptionError(" ".join([f"{', '.join(names)}: these say how to put in a scheme, and none is given.", *hints]))


def compare(
    candidates: Sequence[Candidate | PreTrainedModel | str | Path],
    *,
    text: object = None,
    documents: object = None,
    lengths: Sequence[int] | int | None = None,
    metrics: Sequence[str] | str | None = None,
    trials: int | None = None,
    margin: float | None = None,
    key_spans: str | Path | None = None,
    seed: int | None = None,
    settings: EvalSettings | None = None,
    max_length: int | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    column: str = TEXT,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    out: str | Path | None = None,
    pictures: bool = True,
    alone: bool = False,
    progress: bool | None = None,
    reporter: Reporter | None = None,
    trust_remote_code: bool = False,
    baseline: str | None = None,
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
        text: as the source in `hf_posswap.comparison.read_documents`; "python": the running
            Python's own text; None: the same, with a warning.
        documents: maximum number of documents; None: 48. It also takes what `text` takes.
        lengths: lengths to measure, in tokens; None: 1, 2, 4 and 8 windows.
        metrics: names of what to measure, as in `EvalSettings`.
        trials: as in `evaluate`.
        margin: as in `evaluate`.
        key_spans: as in `evaluate`.
        seed: as in `evaluate`.
        settings: as in `evaluate`.
        max_length: tokens that the schemes of candidates without a `max_length` should support; None: the longest
            measured length.
        tokenizer: the tokenizer of all models; None: that of the first folder or Hub id; where all are model objects,
            that of the folder or Hub id that the first was loaded from.
        column: the text column, if the text has rows.
        device: as in `evaluate`; None: the device that a launch assigns to each process, or "auto".
        dtype: as in `evaluate`.
        out: as in `evaluate`.
        pictures: whether to draw pictures if `out` is given.
        alone: whether this process measures alone in a launch of several processes; required if the others do not call
            this function.
        progress: show a bar over all units of all models (documents, prompts and lengths of each metric); None: as in
            `evaluate`.
        reporter: as in `evaluate`.
        trust_remote_code: run code that comes with a folder or Hub id if a model or a tokenizer needs it.
        baseline: name of the model to compare with; None: the model called "control", else the first.
        command: the command line to record in the results.

    Raises:
        UnknownNameError: no model is called `baseline`, or no such metric.
        OptionError: a setting is invalid, there are no candidates or duplicate names, or a candidate is not a model,
            folder or Hub id.
        DataError: different tokenizers; and as `evaluate`.
        MissingDependencyError: matplotlib is needed for pictures, or accelerate for several processes, and it is not
            installed.
        CheckpointError, PositionRangeError, NotEnoughMemoryError, NumericError: as `evaluate`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.training import byte_tokenizer
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
        >>> sweep = [Candidate(model, name="base"), Candidate(model, "rope"), Candidate(model, "alibi")]
        >>> how = {"lengths": [16], "metrics": "ppl_prefix", "text": "python", "documents": 2}
        >>> list(compare(sweep, tokenizer=byte_tokenizer(), **how).results["comparisons"])
        ['GPT2LMHeadModel+rope', 'GPT2LMHeadModel+alibi']
    """
    chosen = [_with_length(c if isinstance(c, Candidate) else Candidate(c), max_length) for c in _listed(candidates)]
    text, count = text_and_count(text, documents)
    settings = merge_settings(
        settings,
        {
            "documents": count, "lengths": lengths, "metrics": metrics, "trials": trials, "margin": margin,
            "key_spans": key_spans, "seed": seed,
        },
    )  # fmt: skip
    device, dtype, reporter = resolve_device(device), resolve_dtype(dtype), reporter_for(progress, reporter)
    for candidate in chosen:
        candidate.check()
    names = candidate_names(chosen)
    reference = reference_name(names, baseline)
    folder = None if out is None else expand_home(out)
    if folder is not None and pictures:
        require_pictures()
    check_paths(text)
    # before a tokenizer or a model is loaded
    if settings.key_spans is not None:
        KeySpans.load(settings.key_spans)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cannot write to the folder {shown(folder)}: it is a file. Choose another.")
    loaded_tokenizer = tokenizer_for(chosen, tokenizer, trust_remote_code=trust_remote_code)
    ranks = open_ranks(alone=alone)
    loader = ModelLoader({}, device or ranks.device or resolve_device("auto"), dtype, trust_remote_code)
    # before weights are loaded, because it may be in use; the main process is first, and repairs torn lines
    main = ranks.agree(lambda: RunStore(folder) if ranks.is_main else None)
    other = ranks.agree(lambda: None if ranks.is_main else RunStore(folder, ranks.index))
    with main or other or RunStore(folder) as store:
        works, lengths = ranks.agree(
            lambda: prepare(chosen, names, reference, loaded_tokenizer, text, column, settings, store, loader)
        )
        for work in works:
            work.ranks, work.reporter = ranks, reporter if ranks.is_main else None
        results = measure_all(works, lengths, reference, command)
        if folder is not None:
            ranks.agree(lambda: _write(results, folder, pictures) if ranks.is_main else None)
        return Evaluation(results, folder, sum(ranks.gather(store.computed)))


def _listed(candidates: Any) -> list[Any]:
    """Return the candidates as a list, also if only one is given; a module of torch may be iterable, too."""
    is_one = isinstance(candidates, str | Path | nn.Module) or not isinstance(candidates, Iterable)
    return [candidates] if is_one else [*candidates]


def _with_length(candidate: Candidate, max_length: int | None) -> Candidate:
    """Return `candidate` with the `max_length` of the call if it puts in a scheme and has none of its own."""
    check_max_length(max_length)
    if candidate.scheme is None or candidate.max_length is not None:
        return candidate
    return replace(candidate, max_length=max_length)


def _write(results: Results, folder: Path, pictures: bool) -> None:
    keep_date(results, folder)
    write_results(results, folder)
    if pictures:
        draw_pictures(results, folder)
