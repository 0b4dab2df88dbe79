"""Token windows by index, their order, and their collation into batches.

Windows can be masked for an encoder, as BERT does, placed at positions beyond the window, or mixed by length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_posswap.errors import DataError
from hf_posswap.training.data.cutting import Cut
from hf_posswap.training.data.settings import Packing
from hf_posswap.training.data.store import TokenStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
_HIDDEN, _SWAPPED = 0.8, 0.1
_BLOCK = 1000
_ITEM = 2  # separates the random draws of items from those of the order, which use the same seed


def pose_draw(size: int, text: int, target: int, random: np.random.Generator) -> tuple[int, int, np.ndarray]:
    """Return the first piece's length, the start of the second in the text, and the positions, int64 [size].

    PoSE with two chunks, as in https://arxiv.org/abs/2309.10400, section 3: the first piece starts at the text's
    beginning and at position 0; r ~ U[1, (size + 1) / 2]; the second starts anywhere later, its positions shifted by
    U[0, target - size].

    Args:
        size: tokens of the window.
        text: tokens of the document from the window's start on, at least `size`.
        target: positions to reach.
        random: of the draws.

    Example:
        >>> first, second, positions = pose_draw(4, 10, 100, np.random.default_rng(0))
        >>> 1 <= first <= 2, first <= second <= 10 - (4 - first), len(positions)
        (True, True, 4)
    """
    first = int(random.integers(1, (size + 1) // 2 + 1))
    second = int(random.integers(first, text - (size - first) + 1))
    positions = np.arange(size)
    positions[first:] += int(random.integers(0, target - size + 1))
    return first, second, positions


def random_positions(size: int, target: int, random: np.random.Generator) -> np.ndarray:
    """Return `size` different positions below `target`, ascending, int64 (https://arxiv.org/abs/2305.16843).

    Example:
        >>> bool((np.diff(random_positions(8, 100, np.random.default_rng(0))) > 0).all())
        True
    """
    return np.sort(random.choice(target, size, replace=False, shuffle=False))


@dataclass(frozen=True)
class Masking:
    """How tokens are masked for an encoder.

    Attributes:
        share: share of the tokens to predict.
        mask: id of the mask token.
        words: ids that may replace a token, without special ones.
        before: special ids before a piece, [CLS].
        after: special ids after it, [SEP].
    """

    share: float
    mask: int
    words: np.ndarray
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def around(self) -> int:
        """Special tokens of a piece."""
        return len(self.before) + len(self.after)

    def hide(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `ids` with some tokens masked, and the labels, -100 where nothing is predicted; both int64 [n].

        As in BERT, 80 % of the tokens to predict become the mask, 10 % a random token, and 10 % stay. At least one
        token is predicted.
        """
        ids = ids.astype(np.int64)
        chosen = random.random(len(ids)) < self.share
        chosen[int(random.integers(len(ids)))] |= not chosen.any()
        labels = np.where(chosen, ids, IGNORED)
        draw = random.random(len(ids))
        random_ids = self.words[random.integers(0, len(self.words), len(ids))]
        swapped = np.where(draw < _HIDDEN + _SWAPPED, random_ids, ids)
        return np.where(chosen, np.where(draw < _HIDDEN, self.mask, swapped), ids), labels


def make_masking(tokenizer: PreTrainedTokenizerBase, share: float) -> Masking:
    """Return the masking for the tokens of `tokenizer`.

    Raises:
        DataError: it has no mask token.
    """
    mask = tokenizer.mask_token_id
    if mask is None:
        raise DataError(
            f"{type(tokenizer).__name__} has no mask token, and an encoder learns to predict masked tokens: use the "
            "model's own tokenizer."
        )
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    wrapped = tokenizer("a")["input_ids"]
    start = next((k for k in range(len(wrapped)) if wrapped[k : k + len(plain)] == plain), 0)
    replacement_ids = np.setdiff1d(np.arange(len(tokenizer)), np.array(tokenizer.all_special_ids))
    return Masking(share, int(mask), replacement_ids, tuple(wrapped[:start]), tuple(wrapped[start + len(plain) :]))


class Order:
    """Maps an item's index to a source and a window of it.

    Every 1000 items hold the sources in proportion to their weights, each at least once; of more than 1000 sources, so
    many items as there are sources. With one source, each pass has every window once.

    Args:
        counts: windows of each source.
        weights: of each source.
        seed: of the orders.

    Example:
        >>> order = Order([3], [1.0], seed=0)
        >>> sorted(order.at(i)[1] for i in range(3)), sorted(order.at(i)[1] for i in range(3, 6))
        ([0, 1, 2], [0, 1, 2])
    """

    def __init__(self, counts: list[int], weights: list[float], seed: int) -> None:
        self.counts, self.seed = counts, seed
        shares = _whole_shares(np.array(weights) / sum(weights), 1 if len(counts) == 1 else max(_BLOCK, len(counts)))
        pattern = np.repeat(np.arange(len(counts)), shares)
        self.pattern = np.random.default_rng((seed, 0)).permutation(pattern)
        self.shares = shares
        self.rank = np.zeros(len(self.pattern), dtype=np.int64)  # of each item among those of its source
        for source in range(len(counts)):
            is_source = self.pattern == source
            self.rank[is_source] = np.arange(is_source.sum())
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def at(self, item: int) -> tuple[int, int]:
        """Return the source of item `item`, and the window in it."""
        block, index = divmod(item, len(self.pattern))
        source = int(self.pattern[index])
        nth = block * int(self.shares[source]) + int(self.rank[index])
        pass_number, rank = divmod(nth, self.counts[source])
        permutation = self._kept.get((source, pass_number))
        if permutation is None:
            for old in [key for key in self._kept if key[0] == source]:
                del self._kept[old]
            permutation = np.random.default_rng((self.seed, 1, source, pass_number)).permutation(self.counts[source])
            self._kept[source, pass_number] = permutation
        return source, int(permutation[rank])


def _whole_shares(shares: np.ndarray, total: int) -> np.ndarray:
    """Return integers with sum `total`, proportional to `shares` by largest remainders, each at least 1.

    `total` is at least the number of shares.
    """
    target = shares * total
    whole = np.maximum(1, np.floor(target).astype(np.int64))
    for _ in range(abs(total - int(whole.sum()))):
        too_few = int(whole.sum()) < total
        remainder = target - whole
        index = int(np.argmax(remainder)) if too_few else int(np.argmin(np.where(whole > 1, remainder, np.inf)))
        whole[index] += 1 if too_few else -1
    return whole


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


@dataclass(frozen=True, eq=False)
class StepRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of a number of steps: a row is one window, or the same number of tokens in several shorter windows.

    All rows of a step have windows of one length, and so has a batch, for any number of processes and any accumulation.
    An item depends only on its index and these attributes, so that reading can resume at any index.

    Attributes:
        windows: windows of each length, by the number of them in a row.
        cut: windows in a row of the first step, of the second, ..., repeated.
        rows: rows of a step, over all processes.
        steps: number of steps.
    """

    windows: Mapping[int, TokenWindows]
    cut: tuple[int, ...]
    rows: int
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows < 1:
            raise DataError(f"a run has at least 1 step of at least 1 row, got {self.steps} of {self.rows}.")

    def __len__(self) -> int:
        return self.steps * self.rows

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return the row's windows, [W, L] each, with the keys of `TokenWindows`."""
        if not 0 <= item < len(self):
            raise IndexError(f"row {item} of {len(self)}")
        step, row = divmod(item, self.rows)
        per_row, earlier_steps = self._step(step)
        first = (earlier_steps * self.rows + row) * per_row
        pass_windows = self.windows[per_row].sized(first + per_row)  # extends into later passes
        chosen = [pass_windows[first + number] for number in range(per_row)]
        return {name: torch.stack([window[name] for window in chosen]) for name in chosen[0]}

    def _step(self, step: int) -> tuple[int, int]:
        """Return the windows per row of `step`, from 0, and how many earlier steps had the same number."""
        cycle, index = divmod(step, len(self.cut))
        per_row = self.cut[index]
        return per_row, cycle * self.cut.count(per_row) + self.cut[:index].count(per_row)
