"""Token windows by index, and their collation into batches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posswap.errors import DataError
from hf_posswap.training.data.cutting import Cut
from hf_posswap.training.data.masking import IGNORED, Masking
from hf_posswap.training.data.order import Order
from hf_posswap.training.data.positions import pose_draw, random_positions
from hf_posswap.training.data.settings import Packing
from hf_posswap.training.data.store import TokenStore

_ITEM = 2  # separates the random draws of items from those of the order, which use the same seed


@dataclass(frozen=True, eq=False)
class TokenWindows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows that depend only on their index and these attributes, so that reading can resume at any index.

    Attributes:
        stores: tokens of each source.
        cuts: the windows of each source.
        order: order of the windows.
        length: tokens of a window, L.
        target: positions to reach.
        packing: see `DataSettings`.
        masking: of an encoder; None: the next token is to be predicted.
        filler: id of padding tokens.
        first_position: value of position 0 in the model's `position_ids`.
        seed: of positions and masking.
        count: items.
        separator: tokens between concatenated documents, int32.
    """

    stores: tuple[TokenStore, ...]
    cuts: tuple[Cut, ...]
    order: Order
    length: int
    target: int
    packing: Packing
    masking: Masking | None
    filler: int
    first_position: int
    seed: int
    count: int
    separator: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def __len__(self) -> int:
        return self.count

    def sized(self, count: int) -> TokenWindows:
        """Return the same sequence with `count` items, which may be less or more than a pass over the text.

        Raises:
            DataError: `count` is not positive.
        """
        if count < 1:
            raise DataError(f"a run has at least 1 window, got {count}.")
        return dataclasses.replace(self, count=count)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return `input_ids`, `labels` and, if needed, `attention_mask` and `position_ids`, int64 [L] each."""
        if not 0 <= item < self.count:
            raise IndexError(f"window {item} of {self.count}")
        source, window = self.order.at(item)
        random = np.random.default_rng((self.seed, _ITEM, item))
        pieces = self.cuts[source].pieces(window)
        if self.packing == "pose":
            fields = self._pose(self.stores[source].tokens, *pieces[0], random)
        else:
            fields = self._pieces(self._read(source, pieces), random)
            if self.packing == "random-positions":
                fields["position_ids"] = random_positions(self.length, self.target, random)
        if self.packing != "documents":
            fields["attention_mask"] = (fields.pop("real")).astype(np.int64)
        if "position_ids" in fields:
            fields["position_ids"] = fields["position_ids"] + self.first_position
        fields.pop("real", None)
        return {name: torch.from_numpy(value) for name, value in fields.items()}

    def _read(self, source: int, pieces: list[tuple[int, int, int]]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Return the tokens of each piece, and which of them the loss counts; concatenated ones are one piece."""
        store = self.stores[source]
        arrays: list[tuple[np.ndarray, np.ndarray | None]] = []
        for start, length, _ in pieces:
            if start < 0:
                separator = self.separator[-1 - start : length - 1 - start]
                arrays.append((separator, None if store.counted is None else np.zeros(length, dtype=bool)))
            else:
                span = slice(start, start + length)
                arrays.append((store.tokens[span], None if store.counted is None else store.counted[span]))
        if self.packing != "concatenated":
            return arrays
        flags = [counted for _, counted in arrays if counted is not None]
        return [(np.concatenate([ids for ids, _ in arrays]), np.concatenate(flags) if flags else None)]

    def _pose(
        self, tokens: np.ndarray, start: int, length: int, end: int, random: np.random.Generator
    ) -> dict[str, np.ndarray]:
        special_tokens = self.length - length
        first, second, positions = pose_draw(length, end - start, self.target - special_tokens, random)
        text = np.concatenate((tokens[start : start + first], tokens[start + second : start + second + length - first]))
        fields = self._pieces([(text, None)], random)
        if self.masking is None:
            if second != first:  # the next token of the text is not here
                fields["labels"][first] = IGNORED
        else:
            before, after = len(self.masking.before), len(self.masking.after)
            piece_positions = positions + before
            positions = np.concatenate((np.arange(before), piece_positions, piece_positions[-1] + 1 + np.arange(after)))
        return fields | {"position_ids": positions}

    def _pieces(
        self, pieces: list[tuple[np.ndarray, np.ndarray | None]], random: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Return the pieces concatenated and padded, each with positions from 0."""
        ids = np.full(self.length, self.filler, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        positions = np.zeros(self.length, dtype=np.int64)
        real = np.zeros(self.length, dtype=bool)
        end = 0
        for piece, counted in pieces:
            ids_read, piece_labels = self._shown(piece, counted, random)
            span = slice(end, end + len(ids_read))
            ids[span], labels[span], real[span] = ids_read, piece_labels, True
            positions[span] = np.arange(len(ids_read))
            end += len(ids_read)
        fields = {"input_ids": ids, "labels": labels, "real": real}
        return fields | {"position_ids": positions} if self.packing == "documents" else fields

    def _shown(
        self, piece: np.ndarray, counted: np.ndarray | None, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the input ids and the labels of a piece, of which the loss counts the tokens `counted`; None: all."""
        if self.masking is None:
            ids = piece.astype(np.int64)
            labels = ids if counted is None else np.where(counted, ids, IGNORED)
            return ids, np.concatenate(([IGNORED], labels[1:]))  # the first token has no context to predict it from
        ids, labels = self.masking.hide(piece, random)
        before, after = self.masking.before, self.masking.after
        ends = (np.full(len(before), IGNORED), np.full(len(after), IGNORED))
        return np.concatenate((before, ids, after)).astype(np.int64), np.concatenate((ends[0], labels, ends[1]))


@dataclass(frozen=True)
class Collate:
    """Collates items into a batch.

    Attributes:
        causal: whether the model predicts the next token.
        dtype: of the mask of an encoder's packed documents.
    """

    causal: bool
    dtype: torch.dtype = torch.float32

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Return arguments of the model's forward, [B, L] each, from windows [L] or rows of windows [W, L].

        For a causal model, positions separate packed documents: transformers builds the mask from them if there is
        neither a mask nor a cache. Encoders get an additive mask [B, 1, L, L]: 0 within a document and the least
        number elsewhere, which every attention implementation supports.
        """
        join = torch.stack if items[0]["input_ids"].dim() == 1 else torch.cat
        batch: dict[str, Any] = {name: join([item[name] for item in items]) for name in items[0]}
        if self.causal:
            batch["use_cache"] = False
        elif "attention_mask" not in batch:
            batch["attention_mask"] = document_mask(batch["position_ids"], self.dtype)
        return batch


def document_mask(positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the additive attention mask of packed documents, [B, 1, L, L].

    Args:
        positions: [B, L], restarting with each document.
        dtype: of the scores.

    Example:
        >>> (document_mask(torch.tensor([[0, 1, 0]])) == 0).int().tolist()
        [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff() != 1
    document = begins.cumsum(-1)  # [B, L]
    same = document[:, None, :, None] == document[:, None, None, :]  # [B, 1, L, L]
    return torch.zeros(same.shape, dtype=dtype).masked_fill_(~same, torch.finfo(dtype).min)
