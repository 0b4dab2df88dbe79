"""The attention that models pay by distance, before and after a swap: read, drawn, and said in a line a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.comparison.candidates import Candidate, Opening
from hf_posswap.comparison.documents import TEXT, EvalDocuments, check_paths, read_documents
from hf_posswap.comparison.names import candidate_names
from hf_posswap.comparison.pictures import require_pictures
from hf_posswap.comparison.tokenizers import tokenizer_for
from hf_posswap.errors import DataError, OptionError, PositionRangeError
from hf_posswap.evaluation.attention_paid import AttentionPaid, attention_by_distance, check_reads_text
from hf_posswap.evaluation.reach import reach_of
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.plotting.attention import AttentionLine, draw_attention
from hf_posswap.text.tokens import check_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PICTURE = "attention"
MOST_TOKENS = 8192
"""Of a text, where no lengths are asked for."""


@dataclass(frozen=True)
class AttentionComparison:
    """What models paid attention to, and its picture.

    Attributes:
        path: of the .png; the .svg lies beside it.
        window: the original one of the first model, in tokens.
        paid: by model and by tokens that were read.
        said: what is to be seen, a line a model and length.
        text: on what it was measured.
    """

    path: Path
    window: int
    paid: dict[str, dict[int, AttentionPaid]]
    said: tuple[str, ...]
    text: str


def compare_attention(
    candidates: Sequence[Candidate | PreTrainedModel | str | Path],
    out: str | Path,
    *,
    documents: Any = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    lengths: Sequence[int] | None = None,
    factor: float = 4.0,
    limit: int = 4,
    column: str = TEXT,
    by_layer: bool = False,
    dark: bool = False,
    device: Any = None,
    trust_remote_code: bool = False,
) -> AttentionComparison:
    """Read texts with several models, such as one before and after a swap, and draw what they pay attention to.

    The mean attention weight by the distance of the key, a line a model, a column a length; beside it, dotted, what
    all keys would get alike. A model that ends before a length has no line there.

    Args:
        candidates: models, folders, Hub ids, or `Candidate`s that put a scheme into one of them.
        out: the folder for attention.png and attention.svg.
        documents: as in `hf_posswap.comparison.read_documents`; None: the running Python's own text.
        tokenizer: of all of them; None: that of the first folder or Hub id.
        lengths: tokens to read of each text; None: the original window of the first, and `factor` times it, up to 8192.
        factor: at least 1.
        limit: most texts.
        column: of text, where documents are rows.
        by_layer: a row of panels for each layer, for six at most; otherwise the mean of all.
        dark: for a dark page.
        device: to run loaded models on; None: the CPU.
        trust_remote_code: run code that a folder or Hub id brings, where a model or a tokenizer needs that.

    Raises:
        OptionError: an impossible length, factor or limit.
        DataError: no candidates, two of one name, tokenizers that differ, too little text, or no original window that
            says the lengths.
        PositionRangeError: a length that none of the models runs.
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
        ...     found = compare_attention(models, folder, tokenizer=byte_tokenizer())
        >>> {name: list(lengths) for name, lengths in found.paid.items()}
        {'base': [16], 'alibi': [16, 64]}
    """
    require_pictures()
    check_paths(documents)
    if not factor >= 1:
        raise OptionError(f"factor is a number of at least 1, got {factor!r}.")
    named = _named(candidates)
    opening = Opening({}, device, trust_remote_code=trust_remote_code)
    window = _window(opening, next(iter(named.values())))
    words = tokenizer_for(list(named.values()), tokenizer, trust_remote_code=trust_remote_code)
    asked = _lengths(lengths, window, factor, next(iter(named)))
    text = read_documents(documents, words, length=asked[-1], limit=limit, column=column)
    models = {name: opening.model(one, asked[-1]) for name, one in named.items()}
    limits = {name: reach_of(unwrap(model)).limit for name, model in models.items()}
    asked = _run_by_some(asked, limits, given=lengths is not None)
    paid = _measured(models, limits, asked, text)
    path = Path(out) / f"{PICTURE}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines, below = {n: _lines(paid, n) for n in asked}, _below(text, by_layer)
    draw_attention(lines, window, path, below=below, causal=_causal(paid), by_layer=by_layer, dark=dark)
    return AttentionComparison(path, window, paid, tuple(_said(paid, limits, asked, window)), text.source)


def _named(candidates: Sequence[Candidate | PreTrainedModel | str | Path]) -> dict[str, Candidate]:
    """Return the candidates by their names, each checked."""
    chosen = [one if isinstance(one, Candidate) else Candidate(one) for one in candidates]
    names = candidate_names(chosen)
    for one in chosen:
        one.check()
    return dict(zip(names, chosen, strict=True))


def _window(opening: Opening, first: Candidate) -> int:
    """Return the original window of the first model, which must read texts."""
    model = unwrap(opening.model(replace(first, scheme=None), 0))
    check_reads_text(model)
    return reach_of(model).window


def _measured(
    models: dict[str, PreTrainedModel], limits: dict[str, int | None], asked: Sequence[int], text: EvalDocuments
) -> dict[str, dict[int, AttentionPaid]]:
    """Return what each model paid, by the tokens that it read."""
    for model in models.values():
        check_token_ids(unwrap(model), text.tokens)
    return {
        name: {n: attention_by_distance(model, text.tokens[:, :n]) for n in asked if _runs(limits[name], n)}
        for name, model in models.items()
    }


def _causal(paid: dict[str, dict[int, AttentionPaid]]) -> bool:
    return all(one.causal for found in paid.values() for one in found.values())


def _lengths(lengths: Sequence[int] | None, window: int, factor: float, name: str) -> tuple[int, ...]:
    if lengths is None:
        if window < 2:
            raise DataError(f"{name} does not say how long its original window is: give lengths.")
        return tuple(sorted({min(window, MOST_TOKENS), min(round(factor * window), MOST_TOKENS)}))
    if not lengths or any(isinstance(n, bool) or not isinstance(n, int) or n < 2 for n in lengths):
        raise OptionError(f"lengths are whole numbers of at least 2 tokens, got {lengths!r}.")
    return tuple(sorted(set(lengths)))


def _run_by_some(asked: tuple[int, ...], limits: dict[str, int | None], *, given: bool) -> tuple[int, ...]:
    """Return the lengths that some model runs; those that were given must all be among them."""
    kept = tuple(n for n in asked if any(_runs(limit, n) for limit in limits.values()))
    unable = [name for name, limit in limits.items() if not kept or not _runs(limit, kept[0])]
    if unable or (given and kept != asked):
        ends = ", ".join(f"{name} at {limit}" for name, limit in limits.items() if limit is not None)
        raise PositionRangeError(
            f"not every length of {list(asked)} is run by some model, or some model runs none: {ends} end there. Give "
            "lengths within, or swap with a larger max_length."
        )
    return kept


def _runs(limit: int | None, length: int) -> bool:
    return limit is None or length <= limit


def _lines(paid: dict[str, dict[int, AttentionPaid]], length: int) -> list[AttentionLine]:
    return [
        AttentionLine(name, number, found[length].totals, found[length].pairs)
        for number, (name, found) in enumerate(paid.items())
        if length in found
    ]


def _below(text: EvalDocuments, by_layer: bool) -> str:
    return (
        f"Mean weight of a key by its distance, over heads{'' if by_layer else ', layers'} and {len(text.names)} "
        "texts; the first token, where models park attention, is left out. Dotted: what each key would get if all got "
        "the same."
    )


def _said(
    paid: dict[str, dict[int, AttentionPaid]], limits: dict[str, int | None], asked: Sequence[int], window: int
) -> list[str]:
    lines = []
    for name, found in paid.items():
        for length in asked:
            if length not in found:
                lines.append(f"{name}, {length} tokens: it ends at {limits[name]}")
                continue
            one = found[length]
            far = f", {one.beyond(window):.1%} beyond the original window" if window < length else ""
            lines.append(
                f"{name}, {length} tokens: half of the attention lies within {one.half} tokens{far}, "
                f"{float(one.first.mean()):.1%} on the first token"
            )
    return lines
