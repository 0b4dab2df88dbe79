"""Windows of tokens by index, and batches of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
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

_ITEM = 2  # what tells the draws of an item from those of the order, which begin with the same seed


@dataclass(frozen=True, eq=False)
class TokenWindows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows that depend on their index and these attributes alone: read in order, they go on anywhere.

    Attributes:
        stores: of each source.
        cuts: the windows of each source.
        order: which comes when.
        length: tokens of a window, L.
        target: positions to reach.
        packing: see `DataSettings`.
        masking: of an encoder; None: the next token is to be predicted.
        filler: id that stands where a document has ended.
        first_position: what the model's `position_ids` call position 0.
        seed: of positions and masking.
        count: items.
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

    def __len__(self) -> int:
        return self.count

    def sized(self, count: int) -> TokenWindows:
        """Return the same sequence of windows, `count` items of it: fewer than a pass over the text, or more.

        Raises:
            DataError: `count` is not positive.
        """
        if count < 1:
            raise DataError(f"a run has at least 1 window, got {count}.")
        return dataclasses.replace(self, count=count)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return `input_ids` and `labels`, int64 [L], and as the packing asks `attention_mask` and `position_ids`."""
        if not 0 <= item < self.count:
            raise IndexError(f"window {item} of {self.count}")
        source, window = self.order.at(item)
        random = np.random.default_rng((self.seed, _ITEM, item))
        tokens, pieces = self.stores[source].tokens, self.cuts[source].pieces(window)
        if self.packing == "pose":
            found = self._pose(tokens, *pieces[0], random)
        else:
            found = self._pieces([tokens[start : start + length] for start, length, _ in pieces], random)
            if self.packing == "random-positions":
                found["position_ids"] = random_positions(self.length, self.target, random)
        if self.packing != "documents":
            found["attention_mask"] = (found.pop("real")).astype(np.int64)
        if "position_ids" in found:
            found["position_ids"] = found["position_ids"] + self.first_position
        found.pop("real", None)
        return {name: torch.from_numpy(value) for name, value in found.items()}

    def _pose(
        self, tokens: np.ndarray, start: int, length: int, end: int, random: np.random.Generator
    ) -> dict[str, np.ndarray]:
        around = self.length - length
        first, second, positions = pose_draw(length, end - start, self.target - around, random)
        text = np.concatenate((tokens[start : start + first], tokens[start + second : start + second + length - first]))
        found = self._pieces([text], random)
        if self.masking is None:
            if second != first:  # what follows is not what followed
                found["labels"][first] = IGNORED
        else:
            before, after = len(self.masking.before), len(self.masking.after)
            inside = positions + before
            positions = np.concatenate((np.arange(before), inside, inside[-1] + 1 + np.arange(after)))
        return found | {"position_ids": positions}

    def _pieces(self, pieces: list[np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the pieces side by side, each at positions from 0 on, and filled up."""
        ids = np.full(self.length, self.filler, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        positions = np.zeros(self.length, dtype=np.int64)
        real = np.zeros(self.length, dtype=bool)
        at = 0
        for piece in pieces:
            shown, wanted = self._shown(piece, random)
            inside = slice(at, at + len(shown))
            ids[inside], labels[inside], real[inside] = shown, wanted, True
            positions[inside] = np.arange(len(shown))
            at += len(shown)
        found = {"input_ids": ids, "labels": labels, "real": real}
        return found | {"position_ids": positions} if self.packing == "documents" else found

    def _shown(self, piece: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return what the model reads of a piece, and what it is to say there."""
        if self.masking is None:
            ids = piece.astype(np.int64)
            return ids, np.concatenate(([IGNORED], ids[1:]))  # nothing before it tells of the first
        ids, labels = self.masking.hide(piece, random)
        before, after = self.masking.before, self.masking.after
        ends = (np.full(len(before), IGNORED), np.full(len(after), IGNORED))
        return np.concatenate((before, ids, after)).astype(np.int64), np.concatenate((ends[0], labels, ends[1]))


@dataclass(frozen=True)
class Collate:
    """Makes a batch of items.

    Attributes:
        causal: whether the model predicts the next token.
        dtype: of the mask of an encoder's packed documents.
    """

    causal: bool
    dtype: torch.dtype = torch.float32

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Return arguments of the model's forward, [B, L] each, of windows [L] or of rows of windows [W, L].

        Packed documents are told apart by their positions where the model is causal: transformers then makes the mask
        itself, as long as there is neither a mask nor a cache. Encoders get the mask, [B, 1, L, L]: 0 within
        a document and the least number elsewhere, which every implementation of attention adds.
        """
        join = torch.stack if items[0]["input_ids"].dim() == 1 else torch.cat
        batch: dict[str, Any] = {name: join([item[name] for item in items]) for name in items[0]}
        if self.causal:
            batch["use_cache"] = False
        elif "attention_mask" not in batch:
            batch["attention_mask"] = document_mask(batch["position_ids"], self.dtype)
        return batch


def document_mask(positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what to add to the scores of packed documents, [B, 1, L, L].

    Args:
        positions: that begin anew with each document, [B, L].
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
