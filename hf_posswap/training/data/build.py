"""Builds training windows from data settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.errors import DataError
from hf_posswap.training.data.cutting import LEAST, Cut, cut_pieces, pack_pieces
from hf_posswap.training.data.masking import Masking, make_masking
from hf_posswap.training.data.mixing import StepRows
from hf_posswap.training.data.order import Order
from hf_posswap.training.data.settings import DataSettings, Packing
from hf_posswap.training.data.sources import check_sources
from hf_posswap.training.data.store import TokenStore, token_stores
from hf_posswap.training.data.telling import Say
from hf_posswap.training.data.windows import Collate, TokenWindows
from hf_posswap.utils.atomic_io import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_JUMPING = ("pose", "random-positions")


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
        summary: documents, tokens and windows of each source, as JSON.
        identity: identifies the tokens, whatever files they came from, as JSON.
    """

    train: TokenWindows
    shorter: Mapping[int, TokenWindows]
    cut: tuple[int, ...]
    collate: Collate
    held_out: Sequence[np.ndarray]
    summary: dict[str, Any]
    identity: dict[str, Any]

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
    """

    stores: Sequence[TokenStore]
    held_out: Sequence[TokenStore]
    masking: Masking | None


def read_text(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, *, causal: bool, say: Say | None = None
) -> TokenizedText:
    """Tokenize the documents of all sources and check that each has a window; no model is needed.

    Arguments and errors are those of `build_data`.
    """
    check_sources(settings)
    masking = None if causal else make_masking(tokenizer, settings.mask_share)
    folder = cache_folder(settings.cache) / "tokens"
    stores, held_out = [], []
    for source in settings.sources:
        store, held_out_store = token_stores(
            source, tokenizer, begin=causal, held_out=settings.held_out, cache=folder, say=say
        )
        around = 0 if masking is None else masking.around
        for length in settings.lengths:
            _cut_documents(store, length, settings.packing, around, source.path)
        stores.append(store)
        held_out.append(held_out_store)
    return TokenizedText(stores, held_out, masking)


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
        DataError: a source cannot be read or has no window, the window is longer than `scheme_length`, or the
            tokenizer has no mask token for an encoder.
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
        filler=_filler(tokenizer),
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

    Raises:
        DataError: a source has no window, or the window is longer than `scheme_length`.
    """
    _check_length(settings, scheme_length)
    around = 0 if masking is None else masking.around

    def windows(length: int) -> TokenWindows:
        cuts = [
            _cut(store, length, settings.packing, around, source.path)
            for store, source in zip(stores, settings.sources, strict=True)
        ]
        return TokenWindows(
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
        )

    train, *others = map(windows, settings.lengths)
    shorter = {settings.length // other.length: other for other in others}
    return TokenData(
        train,
        shorter,
        settings.cut,
        Collate(masking is None, dtype),
        held_out=[document for store in held_out for document in store[:]],
        summary=_summary(settings, [train, *others], held_out),
        identity=_identity(train, settings, held_out),
    )


def _identity(train: TokenWindows, settings: DataSettings, held_out: Sequence[TokenStore]) -> dict[str, Any]:
    digests: dict[str, Any] = {}
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
        raise DataError(
            f"windows of {settings.length} tokens do not fit into the {target} positions that the model is meant for: "
            "take a smaller data.length, or a larger swap.max_length."
        )
    if settings.packing in _JUMPING and settings.length == target:
        raise DataError(
            f"packing {settings.packing!r} trains positions beyond the window, and window and target are both "
            f"{target}: take a smaller length, or packing 'none' or 'documents'."
        )


def _cut(store: TokenStore, length: int, packing: Packing, around: int, name: str) -> Cut:
    cut = _cut_documents(store, length, packing, around, name)
    return pack_pieces(cut, length, around=around) if packing == "documents" else cut


def _cut_documents(store: TokenStore, length: int, packing: Packing, around: int, name: str) -> Cut:
    """Return the windows of one piece each; raise a DataError if there is none."""
    size = length - around
    jumping = packing in _JUMPING
    if size < LEAST:
        raise DataError(
            f"windows of {length} tokens have no room for text next to {around} special tokens: take a larger length, "
            "or a smaller cut."
        )
    cut = cut_pieces(store.offsets, size, whole=jumping)
    if len(cut) == 0:
        longest = int(np.diff(store.offsets).max())
        raise DataError(
            f"{name} has no window for packing {packing!r}: its longest document has {longest} tokens, and "
            f"{size if jumping else LEAST} are needed. Give longer documents or take a smaller length."
        )
    return cut


def _filler(tokenizer: PreTrainedTokenizerBase) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int):
            return token_id
    return 0


def _summary(settings: DataSettings, lengths: list[TokenWindows], held_out: Sequence[TokenStore]) -> dict[str, Any]:
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
            "tokens_left_out": cut.left,
            "held_out_documents": len(held_out_store),
            "held_out_tokens": len(held_out_store.tokens),
        }
        if len(lengths) > 1:
            row["shorter_windows"] = {str(other.length): len(other.cuts[number]) for other in lengths[1:]}
        rows.append(row)
    return {"packing": settings.packing, "length": settings.length, "cut": list(settings.cut), "sources": rows}
