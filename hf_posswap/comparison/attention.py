"""The attention that models pay by distance, before and after a swap: measured, drawn, and summarized per model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posswap.comparison.candidates import Candidate, ModelLoader, tokenizer_for
from hf_posswap.comparison.documents import TEXT, EvalDocuments, check_paths, read_documents, text_and_count
from hf_posswap.comparison.names import candidate_names
from hf_posswap.comparison.pictures import require_pictures
from hf_posswap.comparison.report.looks import model_numbers
from hf_posswap.comparison.report.results import PlanEntry
from hf_posswap.errors import DataError, OptionError, PositionRangeError
from hf_posswap.evaluation.attention_paid import AttentionPaid, attention_by_distance, check_reads_text
from hf_posswap.evaluation.scoring import reach_of
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.plotting.attention import AttentionLine, draw_attention
from hf_posswap.text.tokens import check_token_ids
from hf_posswap.utils import html_tables
from hf_posswap.utils.devices import resolve_device
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PICTURE = "attention"
MOST_TOKENS = 8192
"""Maximum tokens of a text by default."""
MOST_TEXTS = 4
"""Maximum number of texts by default."""


@dataclass(frozen=True, repr=False)
class AttentionComparison(ResultView):
    """The attention of several models by distance, and its picture.

    Attributes:
        path: the .png file; the .svg is next to it.
        window: the original window of the first model, in tokens.
        paid: the measured attention by model and by number of tokens read.
        said: a summary line per model and length.
        text: the source of the texts.
    """

    path: Path
    window: int
    paid: dict[str, dict[int, AttentionPaid]]
    said: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return in_lines(self.said)

    def _repr_facts(self) -> dict[str, object]:
        lengths = sorted({length for by_length in self.paid.values() for length in by_length})
        return {"path": str(self.path), "window": self.window, "models": list(self.paid), "lengths": lengths}

    def _repr_html_(self) -> str:
        return html_tables.together([html_tables.picture(self.path), html_tables.bullets(self.said)])


def compare_attention(
    candidates: Sequence[Candidate | PreTrainedModel | str | Path],
    out: str | Path,
    *,
    text: object = None,
    documents: object = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    lengths: Sequence[int] | None = None,
    factor: float = 4.0,
    limit: int | None = None,
    column: str = TEXT,
    by_layer: bool = False,
    dark: bool = False,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> AttentionComparison:
    """Run several models on texts, such as one before and after a swap, and draw the attention they pay by distance.

    The picture shows the mean attention weight by the distance of the key, with one line per model, one column per
    length, and a dotted line for uniform attention. A model that cannot run a length has no line there.

    Args:
        candidates: models, folders, Hub ids, or `Candidate`s that put a scheme into one of them.
        out: the folder for attention.png and attention.svg.
        text: as the source in `hf_posswap.comparison.read_documents`; "python": the running
            Python's own text; None: the same, with a warning.
        documents: maximum number of texts; None: 4. It also takes what `text` takes.
        tokenizer: the tokenizer of all models; None: that of the first folder or Hub id.
        lengths: tokens to read of each text; None: the original window of the first, and `factor` times it, up to 8192.
        factor: at least 1.
        limit: the maximum number of texts, if `documents` is the text.
        column: the text column, if the text has rows.
        by_layer: draw one row of panels per layer, at most six; otherwise the mean over layers.
        dark: use colours for a dark page.
        device: device of loaded models, "auto", "cpu", "cuda:1", ...; None: "auto", a GPU if there is one.
        trust_remote_code: run code that comes with a folder or Hub id if a model or a tokenizer needs it.

    Raises:
        OptionError: an invalid length, factor or limit; no candidates, or duplicate names.
        DataError: different tokenizers, too little text, or no known original window to derive the lengths from.
        PositionRangeError: no model can run one of the lengths.
        UnsupportedModelError, NotEnoughMemoryError: as `hf_posswap.evaluation.attention_by_distance`.
        UnsupportedSwapError, SchemeError: as `patch_model`.
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: a model cannot be loaded, or the folder cannot be written.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.training import byte_tokenizer
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
        >>> models = [Candidate(model, name="base"), Candidate(model, "alibi", name="alibi")]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     comparison = compare_attention(models, folder, text="python", tokenizer=byte_tokenizer())
        >>> {name: list(lengths) for name, lengths in comparison.paid.items()}
        {'base': [16], 'alibi': [16, 64]}
    """
    require_pictures()
    text, count = text_and_count(text, documents)
    if count is not None and limit is not None:
        raise OptionError("documents and limit are both the maximum number of texts: give one of them.")
    count = next((n for n in (count, limit) if n is not None), MOST_TEXTS)
    device = resolve_device(device or "auto")
    check_paths(text)
    if not factor >= 1:
        raise OptionError(f"factor is a number of at least 1, got {factor!r}.")
    by_name = _checked_candidates(candidates)
    loader = ModelLoader({}, device, trust_remote_code=trust_remote_code)
    model = unwrap(loader.model(replace(next(iter(by_name.values())), scheme=None), 0))
    check_reads_text(model)
    window = reach_of(model).window
    loaded_tokenizer = tokenizer_for(list(by_name.values()), tokenizer, trust_remote_code=trust_remote_code)
    requested = _lengths(lengths, window, factor, next(iter(by_name)))
    read = read_documents(text, loaded_tokenizer, length=requested[-1], limit=count, column=column)
    models = {name: loader.model(candidate, requested[-1]) for name, candidate in by_name.items()}
    limits = {name: reach_of(unwrap(model)).limit for name, model in models.items()}
    requested = _runnable_lengths(requested, limits, given=lengths is not None)
    paid = _measure(models, limits, requested, read)
    path = expand_home(out) / f"{PICTURE}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = _numbers(models)
    lines: dict[int, list[AttentionLine]] = {length: [] for length in requested}
    for name, by_length in paid.items():
        for length, result in by_length.items():
            lines[length].append(AttentionLine(name, numbers[name], result.totals, result.pairs))
    below = (
        f"Mean weight of a key by its distance, over heads{'' if by_layer else ', layers'} and {len(read.names)} "
        "texts, without the first token, which is an attention sink. Dotted: uniform attention."
    )
    is_causal = all(result.causal for by_length in paid.values() for result in by_length.values())
    draw_attention(lines, window, path, below=below, causal=is_causal, by_layer=by_layer, dark=dark)
    return AttentionComparison(path, window, paid, tuple(_summaries(paid, limits, requested, window)), read.source)


def _checked_candidates(candidates: Sequence[Candidate | PreTrainedModel | str | Path]) -> dict[str, Candidate]:
    """Return the candidates by name, after checking each."""
    chosen = [candidate if isinstance(candidate, Candidate) else Candidate(candidate) for candidate in candidates]
    names = candidate_names(chosen)
    for candidate in chosen:
        candidate.check()
    return dict(zip(names, chosen, strict=True))


def _measure(
    models: dict[str, PreTrainedModel], limits: dict[str, int | None], requested: Sequence[int], text: EvalDocuments
) -> dict[str, dict[int, AttentionPaid]]:
    """Measure the attention of each model by the number of tokens read."""
    for model in models.values():
        check_token_ids(unwrap(model), text.tokens)
    return {
        name: {n: attention_by_distance(model, text.tokens[:, :n]) for n in requested if _runs(limits[name], n)}
        for name, model in models.items()
    }


def _lengths(lengths: Sequence[int] | None, window: int, factor: float, name: str) -> tuple[int, ...]:
    if lengths is None:
        if window < 2:
            raise DataError(f"{name} has no known original window: give lengths.")
        return tuple(sorted({min(window, MOST_TOKENS), min(round(factor * window), MOST_TOKENS)}))
    if not lengths or any(isinstance(n, bool) or not isinstance(n, int) or n < 2 for n in lengths):
        raise OptionError(f"lengths are whole numbers of at least 2 tokens, got {lengths!r}.")
    return tuple(sorted(set(lengths)))


def _runnable_lengths(requested: tuple[int, ...], limits: dict[str, int | None], *, given: bool) -> tuple[int, ...]:
    """Return the lengths that at least one model can run; raise if a given length is not among them."""
    runnable = tuple(n for n in requested if any(_runs(limit, n) for limit in limits.values()))
    unable = [name for name, limit in limits.items() if not runnable or not _runs(limit, runnable[0])]
    if unable or (given and runnable != requested):
        ends = ", ".join(f"{name} at {limit}" for name, limit in limits.items() if limit is not None)
        raise PositionRangeError(
            f"of the lengths {list(requested)}, some cannot be run by any model, or some model can run none. Limits: "
            f"{ends}. Give shorter lengths, or swap with a larger max_length."
        )
    return runnable


def _runs(limit: int | None, length: int) -> bool:
    return limit is None or length <= limit


def _numbers(models: dict[str, PreTrainedModel]) -> dict[str, int]:
    """Return the number of each model's style, the same as in a comparison."""
    patches = {name: getattr(unwrap(model), "_posswap", None) for name, model in models.items()}
    plans: dict[str, PlanEntry | None] = {
        name: None if patch is None else {"scheme": patch.plan.scheme.to_dict()} for name, patch in patches.items()
    }
    return model_numbers({"models": {name: {"plan": plan} for name, plan in plans.items()}})


def _summaries(
    paid: dict[str, dict[int, AttentionPaid]], limits: dict[str, int | None], requested: Sequence[int], window: int
) -> list[str]:
    lines = []
    for name, by_length in paid.items():
        for length in requested:
            if length not in by_length:
                lines.append(f"{name}, {length} tokens: it ends at {limits[name]}")
                continue
            result = by_length[length]
            far = f", {result.beyond(window - 1):.1%} beyond the original window" if window < length else ""
            lines.append(
                f"{name}, {length} tokens: half of the attention lies within {result.half} tokens{far}, "
                f"{float(result.first.mean()):.1%} on the first token"
            )
    return lines
