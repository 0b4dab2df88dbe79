"""Builds training windows from data settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.errors import DataError, PositionRangeError
from hf_posswap.text.tokens import with_eos_token
from hf_posswap.training.data.cutting import (
    LEAST,
    Cut,
    concatenate_documents,
    cut_pieces,
    pack_pieces,
    repeat_pieces,
)
from hf_posswap.training.data.settings import DataSettings, Source
from hf_posswap.training.data.sources import Say, check_sources
from hf_posswap.training.data.store import TokenStore, token_stores
from hf_posswap.training.data.windows import Collate, Masking, Order, StepRows, TokenWindows, make_masking
from hf_posswap.utils.atomic_io import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_JUMPING = ("pose", "random-positions")
_TIMES, _ORDER = 3, 4  # separate these random draws from those of `Order` and of items, which use the same seed


@dataclass(frozen=True)
class TokenData:
    """What a run trains on.

    Attributes:
        train: windows of `length` tokens; item i is a dict of the model's arguments without the batch dimension
            ("input_ids", "labels", optionally "attention_mask" and "position_ids"), and depends only on the settings
            and i. Its length is one pass over the text; `train.sized(n)` has n items, with later passes in other
            orders: read it in order.
        shorter: windows of the other lengths of `cut`, by how many of them hold as many tokens as one of `train`.
        cut: of the settings.
        collate: collates items, or rows of `steps`, into a dict for `model(**batch)`; for causal models it sets
            `use_cache=False`, because a cache would disable the masks of packed documents.
        held_out: token ids of the held-out documents, whole, int32 [any length].
        held_out_counted: whether the loss counts each of their tokens, bool [any length]; None: it counts all.
        summary: documents, tokens and windows of each source, as JSON.
        identity: identifies the tokens, whatever files they came from, as JSON.
    """

    train: TokenWindows
    shorter: Mapping[int, TokenWindows]
    cut: tuple[int, ...]
    collate: Collate
    held_out: Sequence[np.ndarray]
    held_out_counted: Sequence[np.ndarray] | None
    summary: dict[str, object]
    identity: dict[str, object]

    @property
    def lengths(self) -> dict[int, TokenWindows]:
        """The windows of each length, by how many hold as many tokens as one of `train`; `train` first."""
        return {1: self.train, **self.shorter}

    def steps(self, count: int, rows: int) -> StepRows:
        """Return the data of `count` steps of `rows` rows each, over all processes.

        Raises:
            DataError: one of them is not positive.
        """
        return StepRows(self.lengths, self.cut, rows, count)


@dataclass(frozen=True)
class TokenizedText:
    """The documents of all sources as tokens, not yet cut into windows.

    Attributes:
        stores: training documents of each source.
        held_out: held-out documents of each source.
        masking: of an encoder; None: the model predicts the next token.
        separator: between concatenated documents.
        begin: id of the token that each document begins with; None: there is none.
        lengthy: token ids of the held-out documents that are long enough for their source.
    """

    stores: Sequence[TokenStore]
    held_out: Sequence[TokenStore]
    masking: Masking | None
    separator: np.ndarray
    begin: int | None
    lengthy: Sequence[np.ndarray]


def read_text(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, *, causal: bool, say: Say | None = None
) -> TokenizedText:
    """Tokenize the documents of all sources and check that each has a window; no model is needed.

    Arguments and errors are those of `build_data`.
    """
    check_sources(settings)
    if settings.eos_token is not None and not causal:
        raise DataError(
            f"data.eos_token={settings.eos_token!r} ends texts for a model that predicts the next token, and this one "
            "is an encoder, whose windows have the special tokens of its tokenizer: leave it out."
        )
    tokenizer = with_eos_token(tokenizer, settings.eos_token)
    masking = None if causal else make_masking(tokenizer, settings.mask_share)
    folder = cache_folder(settings.cache) / "tokens"
    stores, held_out = [], []
    for source in settings.sources:
        store, held_out_store = token_stores(
            source,
            tokenizer,
            begin=causal,
            held_out=settings.held_out,
            cache=folder,
            assistant_only=settings.assistant_only_loss,
            completion_only=settings.completion_only_loss,
            ends=settings.eos_token is not None,
            say=say,
        )
        stores.append(store)
        held_out.append(held_out_store)
    _check_chats(settings, stores, causal=causal)
    begin = tokenizer.bos_token_id if causal else None
    separator = np.array(
        tokenizer(settings.separator, add_special_tokens=False)["input_ids"] if settings.separator else [],
        dtype=np.int32,
    )
    around = 0 if masking is None else masking.around
    for number, store in enumerate(stores):
        for length in settings.lengths:
            _cut(settings, number, store, length, around, separator=separator, begin=begin, packs=False)
    return TokenizedText(
        stores, held_out, masking, separator, begin, [ids for ids, _ in _long_documents(settings, held_out)]
    )


def _check_chats(settings: DataSettings, stores: Sequence[TokenStore], *, causal: bool) -> None:
    """Refuse a loss on parts of chats for an encoder, without a chat, or in windows that separate question and answer.

    Raises:
        DataError: as said.
    """
    is_set_by = {
        "assistant_only_loss": settings.assistant_only_loss,
        "completion_only_loss": bool(settings.completion_only_loss),
    }
    for key in (key for key, is_set in is_set_by.items() if is_set):
        if not any(store.rows.get("chats") for store in stores):
            raise DataError(
                f"data.{key}=true counts parts of chats, and no source has a row with messages, or with prompt and "
                "completion: leave it out, or set data.sources.0.column=messages if the rows have text too."
            )
    if not any(store.counted is not None for store in stores):
        return
    advice = "leave data.assistant_only_loss out and set data.completion_only_loss=false, which counts all tokens"
    if not causal:
        raise DataError(
            f"the loss counts parts of chats, and this model is an encoder, which predicts masked tokens: {advice}."
        )
    if settings.packing == "pose":
        raise DataError(
            "packing 'pose' reads two regions of a text and would separate questions from answers, and the loss counts "
            f"only answers: use packing 'documents' or 'none', or {advice}."
        )


def build_data(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    causal: bool,
    scheme_length: int,
    first_position: int = 0,
    dtype: torch.dtype = torch.float32,
    say: Say | None = None,
) -> TokenData:
    """Return the training data. Documents are tokenized whole, once; later calls read the tokens from the cache.

    Args:
        settings: the sources, and how windows are cut.
        tokenizer: of the model.
        causal: whether the model predicts the next token; otherwise it predicts masked ones.
        scheme_length: positions the swapped model is meant for, `SwapPlan.max_length`: "pose" and "random-positions"
            reach up to it.
        first_position: value of position 0 in the model's `position_ids`, `Sites.first_position`.
        dtype: of the model's weights: the mask of an encoder's packed documents must have it.
        say: shows a progress line now and then if tokenizing takes long; None: nothing is shown.

    Raises:
        ConfigError: there is no source.
        DataError: a source cannot be read or has no window, or the tokenizer has no mask token for an encoder.
        PositionRangeError: the window is longer than `scheme_length`.
        MissingDependencyError: a source needs the package datasets.
        CheckpointError: the cache cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from hf_posswap.training import byte_tokenizer
        >>> from hf_posswap.training.data import Source
        >>> with tempfile.TemporaryDirectory() as cache:
        ...     settings = DataSettings((Source("python", documents=40),), length=64, packing="pose", cache=Path(cache))
        ...     data = build_data(settings, byte_tokenizer(), causal=True, scheme_length=256)
        ...     data.collate([data.train[0], data.train[1]])["position_ids"].shape
        torch.Size([2, 64])
    """
    check_sources(settings)
    _check_length(settings, scheme_length)
    text = read_text(settings, tokenizer, causal=causal, say=say)
    return cut_data(
        settings,
        text.stores,
        text.held_out,
        masking=text.masking,
        separator=text.separator,
        begin=text.begin,
        filler=_filler(with_eos_token(tokenizer, settings.eos_token)),
        scheme_length=scheme_length,
        first_position=first_position,
        dtype=dtype,
    )


def cut_data(
    settings: DataSettings,
    stores: Sequence[TokenStore],
    held_out: Sequence[TokenStore],
    *,
    masking: Masking | None,
    filler: int,
    scheme_length: int,
    first_position: int = 0,
    dtype: torch.dtype = torch.float32,
    separator: np.ndarray | None = None,
    begin: int | None = None,
) -> TokenData:
    """Return training data from documents that are already tokenized.

    Args:
        settings: how windows are cut.
        stores: training tokens of each source.
        held_out: held-out tokens of each source.
        masking: of an encoder; None: the model predicts the next token.
        filler: id of padding tokens.
        scheme_length: as in `build_data`.
        first_position: likewise.
        dtype: likewise.
        separator: token ids between concatenated documents; None: none.
        begin: id of the token that each document begins with, which a separator replaces; None: there is none.

    Raises:
        DataError: a source has no window.
        PositionRangeError: the window is longer than `scheme_length`.
    """
    _check_length(settings, scheme_length)
    around = 0 if masking is None else masking.around
    separator = np.zeros(0, dtype=np.int32) if separator is None else separator

    def windows(length: int) -> tuple[TokenWindows, list[dict[str, int]]]:
        cuts_and_counts = [
            _cut(settings, number, store, length, around, separator=separator, begin=begin)
            for number, store in enumerate(stores)
        ]
        cuts = [cut for cut, _ in cuts_and_counts]
        token_windows = TokenWindows(
            stores=tuple(stores),
            cuts=tuple(cuts),
            order=Order([len(cut) for cut in cuts], [source.weight for source in settings.sources], settings.seed),
            length=length,
            target=scheme_length,
            packing=settings.packing,
            masking=masking,
            filler=filler,
            first_position=first_position,
            seed=settings.seed,
            count=sum(map(len, cuts)),
            separator=separator,
        )
        return token_windows, [counts for _, counts in cuts_and_counts]

    (train, left_out), *others = map(windows, settings.lengths)
    shorter = {settings.length // other.length: other for other, _ in others}
    long_documents = _long_documents(settings, held_out)
    all_counted = all(store.counted is None for store in held_out)
    return TokenData(
        train,
        shorter,
        settings.cut,
        Collate(masking is None, dtype),
        held_out=[ids for ids, _ in long_documents],
        held_out_counted=None if all_counted else [counted for _, counted in long_documents],
        summary=_summary(settings, [train, *(other for other, _ in others)], held_out, left_out),
        identity=_identity(train, settings, held_out),
    )


def _long_documents(settings: DataSettings, stores: Sequence[TokenStore]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return token ids and flags of the held-out documents that have the least tokens of their source.

    Raises:
        DataError: none has.
    """
    documents = [
        (store[number], store.counted_of(number))
        for source, store in zip(settings.sources, stores, strict=True)
        for number in range(len(store))
        if len(store[number]) >= (source.min_tokens or 0)
    ]
    if not documents and any(map(len, stores)):
        raise DataError(
            "no held-out document has the tokens of min_tokens, so there is none to measure on: raise data.held_out, "
            "or lower min_tokens."
        )
    return documents


def _identity(train: TokenWindows, settings: DataSettings, held_out: Sequence[TokenStore]) -> dict[str, object]:
    digests: dict[str, object] = {}
    for number, (source, train_store, held_out_store) in enumerate(
        zip(settings.sources, train.stores, held_out, strict=True), 1
    ):
        name = f"documents of {source.path}" + (f" (source {number})" if len(settings.sources) > 1 else "")
        digests[name] = train_store.digest + held_out_store.digest
    special: dict[str, Any] = {"filler": train.filler}
    if train.masking is not None:
        around = {"before": list(train.masking.before), "after": list(train.masking.after)}
        special |= {"mask": train.masking.mask} | around
    return digests | {"special tokens": special}


def _check_length(settings: DataSettings, target: int) -> None:
    if settings.length > target:
        raise PositionRangeError(
            f"windows of {settings.length} tokens do not fit into the {target} positions that the model is meant for: "
            "take a smaller data.length, or a larger swap.max_length."
        )
    if settings.packing in _JUMPING and settings.length == target:
        raise DataError(
            f"packing {settings.packing!r} trains positions beyond the window, and window and target are both "
            f"{target}: take a smaller length, or packing 'none' or 'documents'."
        )


def _cut(
    settings: DataSettings,
    number: int,
    store: TokenStore,
    length: int,
    around: int,
    *,
    separator: np.ndarray,
    begin: int | None,
    packs: bool = True,
) -> tuple[Cut, dict[str, int]]:
    """Return the windows of source `number`, and the counts of what is in no window, by the name in the summary.

    Args:
        settings: how windows are cut.
        number: of the source.
        store: its training documents.
        length: tokens of a window.
        around: special tokens around each piece.
        separator: as in `cut_data`.
        begin: likewise.
        packs: whether to pack; otherwise packing "documents" gives one piece per window.

    Raises:
        DataError: there is no window.
    """
    source, size = settings.sources[number], length - around
    if size < LEAST:
        raise DataError(
            f"windows of {length} tokens have no room for text next to {around} special tokens: take a larger length, "
            "or a smaller cut."
        )
    lengths = np.diff(store.offsets)
    times = _times(lengths, source, np.random.default_rng((settings.seed, _TIMES, number)))
    counts: dict[str, int] = {}
    if source.min_tokens is not None:
        counts["documents_too_short"] = int((lengths < source.min_tokens).sum())
    if source.upsample is not None:
        counts["documents_read_again"] = int((np.maximum(times, 1) - 1).sum())
        counts["documents_not_read"] = int((times == 0).sum()) - counts.get("documents_too_short", 0)
    if settings.packing == "concatenated":
        order = concatenation_order(times, np.random.default_rng((settings.seed, _ORDER, number)))
        begins = (store.tokens[np.minimum(store.offsets[:-1], len(store.tokens) - 1)] == begin) & (lengths > 0)
        skipped = begins.astype(np.int64) if len(separator) and begin is not None else np.zeros_like(lengths)
        cut = concatenate_documents(store.offsets, size, order, skipped=skipped, separator=len(separator))
        cut = dataclasses.replace(cut, left=cut.left + int(lengths[times == 0].sum()))
        if store.counted is not None:
            cut, counts["windows_without_loss"] = _counted_windows(cut, store.counted)
    else:
        cut = cut_pieces(store.offsets, size, whole=settings.packing in _JUMPING)
        document = np.searchsorted(store.offsets, cut.starts, side="right") - 1
        piece_times = times[document]
        if store.counted is not None:
            piece_times, loss_counts = _counted_pieces(cut, piece_times, document, store)
            counts |= loss_counts
        cut = repeat_pieces(cut, piece_times)
    if len(cut) == 0:
        raise _no_window(settings, source, lengths, size, counts)
    if settings.packing == "documents" and packs:
        cut = pack_pieces(cut, length, around=around)
    return cut, counts


def _times(lengths: np.ndarray, source: Source, random: np.random.Generator) -> np.ndarray:
    """Return how often a pass reads each document of `lengths` tokens, int64 [documents].

    A fraction is the share of the documents that are read once more.

    Example:
        >>> source = Source("books", min_tokens=5, upsample={10: 3, 20: 0})
        >>> _times(np.array([4, 5, 10, 19, 20]), source, np.random.default_rng(0)).tolist()
        [0, 1, 3, 3, 0]
    """
    factors = np.ones(len(lengths))
    for tokens, factor in sorted((source.upsample or {}).items()):
        factors[lengths >= tokens] = factor
    factors[lengths < (source.min_tokens or 0)] = 0
    whole = np.floor(factors)
    return (whole + (random.random(len(lengths)) < factors - whole)).astype(np.int64)


def concatenation_order(times: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the order of documents, each `times` times, so that all are read once before any is read again.

    A document does not follow itself, unless all others have been read as often as they should.

    Example:
        >>> order = concatenation_order(np.array([2, 2, 1, 4]), np.random.default_rng(0))
        >>> sorted(order[:4].tolist()), sorted(order[4:7].tolist()), order[7:].tolist()
        ([0, 1, 2, 3], [0, 1, 3], [3, 3])
    """
    order = np.zeros(0, dtype=np.int64)
    for number in range(int(times.max(initial=0))):
        again = random.permutation(np.flatnonzero(times > number))
        if len(order) and len(again) > 1 and again[0] == order[-1]:
            again[[0, -1]] = again[[-1, 0]]
        order = np.concatenate([order, again])
    return order


def _counted_windows(cut: Cut, counted: np.ndarray) -> tuple[Cut, int]:
    """Return the windows of concatenated documents that have a token to predict, and how many have none."""
    kept = [
        any(
            counted[max(start, 0) + (number == 0) : start + length].any()
            for number, (start, length, _) in enumerate(cut.pieces(window))
            if start >= 0
        )
        for window in range(len(cut))
    ]
    if all(kept):
        return cut, 0
    sizes = np.diff(cut.windows)
    pieces = np.repeat(np.array(kept), sizes)
    left = cut.left + int(cut.lengths[~pieces & (cut.starts >= 0)].sum())
    windows = np.cumsum([0, *sizes[kept]], dtype=np.int64)
    return Cut(cut.starts[pieces], cut.lengths[pieces], cut.ends[pieces], windows, left), kept.count(False)


def _counted_pieces(
    cut: Cut, times: np.ndarray, document: np.ndarray, store: TokenStore
) -> tuple[np.ndarray, dict[str, int]]:
    """Return `times` with 0 for pieces that have no token to predict, and for the ends of chats beyond a window.

    An answer without its question teaches nothing about the question, so a chat is truncated as by TRL.
    """
    assert store.counted is not None
    total = np.concatenate(([0], np.cumsum(store.counted, dtype=np.int64)))
    masked = np.diff(total[store.offsets]) < np.diff(store.offsets)  # documents that are not counted whole
    truncated = masked[document] & (cut.starts > store.offsets[document])
    without = ~truncated & (total[cut.starts + cut.lengths] == total[cut.starts + 1])
    counts = {
        "tokens_truncated": int(cut.lengths[truncated & (times > 0)].sum()),
        "windows_without_loss": int((without & (times > 0)).sum()),
    }
    return np.where(truncated | without, 0, times), counts


def _no_window(
    settings: DataSettings, source: Source, lengths: np.ndarray, size: int, counts: dict[str, int]
) -> DataError:
    """Return the error for a source without windows."""
    longest, jumping = int(lengths.max(initial=0)), settings.packing in _JUMPING
    if counts.get("windows_without_loss"):
        return DataError(
            f"{source.path}: no window of {size} tokens has a token that the loss counts, since the questions are "
            "longer: take a larger data.length."
        )
    if source.min_tokens is not None and longest < source.min_tokens:
        return DataError(
            f"{source.path} has no document of {source.min_tokens} tokens (the longest has {longest}): give longer "
            "documents, or a smaller min_tokens."
        )
    if counts.get("documents_not_read"):
        return DataError(f"{source.path}: upsample leaves no document: give a factor above 0 for those it has.")
    return DataError(
        f"{source.path} has no window for packing {settings.packing!r}: its longest document has {longest} tokens, and "
        f"{size if jumping else LEAST} are needed. Give longer documents or take a smaller length."
    )


def _filler(tokenizer: PreTrainedTokenizerBase) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int):
            return token_id
    return 0


def _summary(
    settings: DataSettings,
    lengths: list[TokenWindows],
    held_out: Sequence[TokenStore],
    left_out: list[dict[str, int]],
) -> dict[str, object]:
    rows = []
    for number, (source, held_out_store) in enumerate(zip(settings.sources, held_out, strict=True)):
        store, cut = lengths[0].stores[number], lengths[0].cuts[number]
        row = {
            "source": source.path,
            "weight": source.weight,
            "documents": len(store),
            "tokens": len(store.tokens),
            "windows": len(cut),
            "tokens_in_windows": int(cut.lengths.sum()),
            "padding": round(max(0.0, 1 - int(cut.lengths.sum()) / max(1, len(cut) * settings.length)), 4),
            "tokens_left_out": cut.left,
            "held_out_documents": len(held_out_store),
            "held_out_tokens": len(held_out_store.tokens),
        }
        row |= left_out[number]
        if store.rows.get("chats"):
            row |= store.rows
        if store.counted is not None:
            row["tokens_counted"] = int(store.counted.sum())
        if len(lengths) > 1:
            row["shorter_windows"] = {str(other.length): len(other.cuts[number]) for other in lengths[1:]}
        rows.append(row)
    return {"packing": settings.packing, "length": settings.length, "cut": list(settings.cut), "sources": rows}
