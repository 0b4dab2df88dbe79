"""Attention in pieces: one softmax over scores that come from several pairs of rotations.

Queries are taken in blocks, so that nothing of [Q, K] is ever held at once, and in each block a piece's scores are
computed only for the keys that it holds.

One query, a step of decoding, takes the fewest calls: which keys each piece holds is read once for all layers, the
query is rotated for all pieces at once, and the keys of each piece, which lie side by side, are read where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_posswap.compat.torch_dispatch import is_exporting
from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.patching.sites.attention.forward_memo import identity_of
from hf_posswap.rope_math import CosSin, rotate
from hf_posswap.schemes.common.piece import Piece, in_a_row
from hf_posswap.utils.devices import device_type, is_capturing

BLOCK = 256
"""Queries that are scored at once."""
LOWEST = torch.finfo(torch.float32).min
"""The score of a pair that is masked."""


class KeyRange(NamedTuple):
    """The keys that a piece holds for a block of queries.

    Attributes:
        piece: that holds them.
        low: the first key that any query holds.
        high: the one after the last.
        which: of the keys between, [B or 1, q, high - low]; None: all.
    """

    piece: Piece
    low: int
    high: int
    which: Tensor | None


class Ranges(NamedTuple):
    """Which keys the pieces hold for one query.

    Attributes:
        ranges: of the pieces that hold any, in their order.
        end: the key from which on no row sees any.
        turns: of the query for the pieces of `ranges`, [B or 1, 1, P, R/2]; None: some keys are in no range.
    """

    ranges: list[KeyRange]
    end: int
    turns: CosSin | None


@dataclass(eq=False)
class Scoring:
    """What the scores of a block are made of.

    Attributes:
        pieces: of the attention.
        query: [B, H, Q, D], not rotated.
        key: [B, G, K, D], as it is cached.
        value: [B, G, K, Dv].
        query_positions: [B or 1, Q].
        key_positions: [B or 1, K].
        mask: bool (True: attend) or additive, [B or 1, 1 or H, Q, K]; None: no mask.
        causal: where there is no mask: whether a query sees only keys up to its own index.
        scaling: multiplies the scores.
        memo: what was read for one query, for all layers that ask the same.
        is_shared: whether other layers are given the same memo.
    """

    pieces: tuple[Piece, ...]
    query: Tensor
    key: Tensor
    value: Tensor
    query_positions: Tensor
    key_positions: Tensor
    mask: Tensor | None
    causal: bool
    scaling: float
    memo: dict[Any, Any]
    is_shared: bool

    @property
    def wide(self) -> torch.dtype:
        """The dtype of scores: float32, or the queries' where that is wider."""
        return torch.promote_types(self.query.dtype, torch.float32)

    def block(self, start: int, stop: int) -> Tensor:
        """Return the masked scores of queries start to stop, [B, H, q, K], of dtype `wide`."""
        seen, keys = self._seen(start, stop), self.key_positions.shape[1]
        is_read = self.query.shape[2] == 1 and self._can_read()
        ranges = self.ranges_of_one().ranges if is_read else self._holding(start, stop, seen)
        turned: dict[object, Tensor] = {}
        by_range = [self._range_scores(key_range, start, stop, turned) for key_range in ranges]
        is_split = all(r.which is None for r in ranges) and sum(r.high - r.low for r in ranges) == keys
        if is_split and _cover(ranges, keys):
            return self._masked(torch.cat(by_range, dim=-1), seen, start, stop)
        batch, heads, _, _ = self.query.shape
        # what no query sees may belong to no piece here
        scores = self.query.new_full((batch, heads, stop - start, keys), LOWEST, dtype=self.wide)
        for key_range, range_scores in zip(ranges, by_range, strict=True):
            if key_range.which is not None:
                seen_scores = scores[..., key_range.low : key_range.high]
                range_scores = torch.where(key_range.which[:, None], range_scores, seen_scores)
            scores = torch.cat((scores[..., : key_range.low], range_scores, scores[..., key_range.high :]), dim=-1)
        return self._masked(scores, seen, start, stop)

    def ranges_of_one(self) -> Ranges:
        """Return which keys each piece holds for the one query, read once for all layers that ask the same."""
        known = self.key_positions.shape[1], id(self.mask), identity_of(self.mask)[1]
        if known not in self.memo:
            if not self._can_read():
                return _ranges(self._holding(0, 1, None), self.key_positions.shape[1])
            self.memo[known] = self._read_ranges(), self.mask  # held too, so that its id is not given to another
        ranges: Ranges = self.memo[known][0]
        return ranges

    def _can_read(self) -> bool:
        """Return whether numbers can be read: no graph is made, and another device is waited for once, not by layer."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not holds_values(self.key_positions):
            return False
        if device_type(self.key_positions) == "cpu":
            return True
        return self.is_shared and not is_capturing()

    def _read_ranges(self) -> Ranges:
        """Return which keys each piece holds for the one query; another device is waited for once."""
        rows, columns = self.query_positions.cpu()[:, :, None], self.key_positions.cpu()[:, None, :]
        keys, shown = columns.shape[-1], None if self.mask is None else self._shown(0, 1).cpu()
        belongs = torch.cat([piece.pairs.holds(rows, columns) for piece in self.pieces], dim=1)  # [B or 1, P, K]
        of_any = belongs.any(dim=0)  # [P, K]
        seen = of_any if shown is None else (belongs & shown).any(dim=0)
        lows = of_any.int().argmax(dim=-1).tolist()  # a range may begin in padding, so that all lie side by side
        highs = (keys - seen.flip(-1).int().argmax(dim=-1)).tolist()
        ranges = []
        for number, (piece, low, high) in enumerate(zip(self.pieces, lows, highs, strict=True)):
            if seen[number, high - 1]:
                which = belongs[:, number : number + 1, low:high]
                ranges.append(KeyRange(piece, low, high, None if which.all() else which.to(self.key.device)))
        end = keys
        if shown is not None and shown.any(dim=-1).all():  # else a row that sees no key attends to all of them
            end = int(shown.any(dim=0).nonzero()[-1, -1]) + 1
        return _ranges(sorted(ranges, key=lambda key_range: key_range.low), end)

    def one(self) -> Tensor | None:
        """Return attention of the one query [B, 1, H, Dv]; None: some of its keys are in no piece's range."""
        ranges, end, turns = self.ranges_of_one()
        if turns is None or (self.mask is not None and self.mask.shape[1] > 1):
            return None
        key, value = (states if states.shape[2] == end else states[:, :, :end] for states in (self.key, self.value))
        return attend_one(self.query, key, value, turns, ranges, self.mask, scaling=self.scaling)

    def _range_scores(self, key_range: KeyRange, start: int, stop: int, turned: dict[object, Tensor]) -> Tensor:
        """Return the scores of a piece for its range of keys, [B, H, q, high - low].

        Args:
            key_range: the piece, and its range.
            start: the first query.
            stop: the one after the last.
            turned: keeps the keys that pieces have in common.
        """
        query = key_range.piece.rotate_query(self.query[:, :, start:stop], start, stop)
        known: tuple[object, ...] = key_range.piece.key_identity
        if not torch.compiler.is_compiling():  # else the range is all keys, and its end may be a symbol without a hash
            known = (*known, key_range.low, key_range.high)
        if known not in turned:
            low, high = key_range.low, key_range.high
            turned[known] = key_range.piece.rotate_key(self.key[:, :, low:high], low, high)
        return grouped_matmul(query, turned[known].transpose(-1, -2)).to(self.wide) * self.scaling

    def _holding(self, start: int, stop: int, seen: Tensor | None) -> list[KeyRange]:
        """Return which keys each piece holds for the queries start to stop, in their order; none: it is left out."""
        rows = self.query_positions[:, start:stop, None]  # [B or 1, q, 1]
        columns = self.key_positions[:, None, :]  # [B or 1, 1, K]
        shown = None if seen is not None or self.mask is None or _is_dear(self.mask) else self._shown(start, stop)
        ranges = []
        for piece in self._needed(rows, columns, shown if seen is None else seen):
            belongs = piece.pairs.holds(rows, columns)  # [B or 1, q, K]
            low, high = _range(belongs if seen is None else belongs & seen)
            if shown is not None:  # a range may begin in padding, so that those of all pieces lie side by side
                high = min(high, _range(belongs & shown)[1])
            which = belongs[..., low:high]
            if low < high:
                is_whole = not _is_dear(which) and bool(which.all())
                ranges.append(KeyRange(piece, low, high, None if is_whole else which))
        return sorted(ranges, key=lambda key_range: key_range.low)

    def _needed(self, rows: Tensor, columns: Tensor, shown: Tensor | None) -> list[Piece]:
        """Return the pieces, without those of later keys where the queries are shown none.

        Args:
            rows: positions of the queries, [B or 1, q, 1].
            columns: positions of the keys, [B or 1, 1, K].
            shown: which keys the queries see, [B or 1, q, K] or [q, K]; None: all, or it is not known.
        """
        past = [piece for piece in self.pieces if not getattr(piece.pairs, "is_ahead", False)]
        if len(past) == len(self.pieces) or _is_dear(columns):
            return list(self.pieces)
        later = columns > rows
        return list(self.pieces) if bool((later if shown is None else later & shown).any()) else past

    def _shown(self, start: int, stop: int) -> Tensor:
        """Return which keys the mask shows queries start to stop in any head, bool [B or 1, q, K]."""
        assert self.mask is not None
        mask = self.mask[..., start:stop, : self.key_positions.shape[1]]
        return (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min).any(dim=1)

    def _seen(self, start: int, stop: int) -> Tensor | None:
        """Return which keys the queries start to stop may see by their index, bool [q, K]; None: all of them."""
        length, keys = self.query_positions.shape[1], self.key_positions.shape[1]
        if self.mask is not None or not self.causal or length == 1:
            return None
        row = torch.arange(start, stop, device=self.key_positions.device)[:, None]
        return torch.arange(keys, device=self.key_positions.device)[None] <= row

    def _masked(self, scores: Tensor, seen: Tensor | None, start: int, stop: int) -> Tensor:
        if seen is not None:
            return scores.masked_fill(~seen, LOWEST)
        if self.mask is None:
            return scores
        mask = self.mask[..., start:stop, : scores.shape[-1]]
        if mask.dtype == torch.bool:
            return scores.masked_fill(~mask, LOWEST)
        return (scores + mask).clamp(min=LOWEST)


def grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of `left` [B, H, q, n] and `right` [B, G, n, m], which H/G heads share: [B, H, q, m]."""
    rows, by_group = left.shape[2], left.unflatten(1, (right.shape[1], -1))
    if _is_free(rows):  # torch.export guards a length when axes are merged, and refuses a free one
        return torch.matmul(by_group, right[:, :, None]).flatten(1, 2)
    together = by_group.flatten(2, 3)  # [B, G, H/G q, n]: nothing of `right` is repeated
    return torch.matmul(together, right).unflatten(2, (-1, rows)).flatten(1, 2)


def _ranges(ranges: list[KeyRange], end: int) -> Ranges:
    tables = tuple(CosSin(one.piece.query.cos, one.piece.query.sin) for one in ranges)
    return Ranges(ranges, end, in_a_row(tables) if _cover(ranges, end) else None)


def _cover(ranges: list[KeyRange], keys: int) -> bool:
    """Return whether each of `keys` keys is in one of the ranges, which may overlap: rows of a batch may differ."""
    end = 0
    for _, low, high, _ in ranges:
        if low > end:
            return False
        end = max(end, high)
    return end == keys


def _is_dear(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor are not there to be read, or only by waiting for another device."""
    return torch.compiler.is_compiling() or device_type(tensor) != "cpu"


def _is_free(length: int) -> bool:
    """Return whether torch.export traces a graph whose `length` may be any; in its strict mode none tells."""
    return not isinstance(length, int) or (torch.compiler.is_dynamo_compiling() and is_exporting() is True)


def _range(belongs: Tensor) -> tuple[int, int]:
    """Return the first key that any query of a block holds, and the one after the last; all where asking is dear."""
    keys = belongs.shape[-1]
    if _is_dear(belongs):
        return 0, keys
    indices = belongs.flatten(0, -2).any(dim=0).nonzero()
    return (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)


def attend_split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: tuple[Piece, ...],
    query_positions: Tensor,
    key_positions: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
    dropout: float = 0.0,
    weights: bool = False,
    memo: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return softmax attention whose score for a query and a key is that of the piece which holds them.

    Args:
        query: [B, H, Q, D], not rotated.
        key: [B, G, K, D], as it is cached.
        value: [B, G, K, Dv].
        pieces: of the attention; each pair of a query and a key belongs to one.
        query_positions: [B or 1, Q].
        key_positions: [B or 1, K].
        mask: bool (True: attend) or additive, [B or 1, 1 or H, Q or 1, K]; None as transformers leaves it out.
        causal: whether a left-out mask means causal.
        scaling: multiplies the scores; None: 1/sqrt(D).
        dropout: probability of dropping an attention weight.
        weights: whether to return the attention weights; all queries are then one block.
        memo: kept by the caller for all calls with the same pieces and positions; None: nothing is kept.

    Returns:
        [B, Q, H, Dv], and the weights [B, H, Q, K] or None.
    """
    if mask is not None and mask.shape[-2] == 1 < query.shape[2]:  # one row for all queries, which come in blocks
        mask = mask.expand(-1, -1, query.shape[2], -1)
    scoring = Scoring(
        pieces=pieces,
        query=query,
        key=key,
        value=value,
        query_positions=query_positions,
        key_positions=key_positions,
        mask=mask,
        causal=causal,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        memo={} if memo is None else memo,
        is_shared=memo is not None,
    )
    length = query.shape[2]
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not (traced or weights or dropout) and length == 1:
        attended = scoring.one()
        if attended is not None:
            return attended, None
    whole = weights or _is_free(length)  # torch.export: blocks of any length cannot be counted
    outs = []
    last = 0 if whole else (length - 1) // BLOCK  # a compiled graph is for as many blocks, whatever the length
    for number in range(last + 1):
        start = number * BLOCK
        scores = scoring.block(start, length if number == last else start + BLOCK)
        chances = torch.softmax(scores, dim=-1).to(query.dtype)  # [B, H, q, K]
        chances = torch.nn.functional.dropout(chances, p=dropout, training=dropout > 0)
        outs.append(grouped_matmul(chances, value))  # [B, H, q, Dv]
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), chances if weights else None


def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    turns: CosSin,
    ranges: Sequence[KeyRange],
    mask: Tensor | None,
    *,
    scaling: float,
) -> Tensor:
    """Return attention of one query [B, 1, H, Dv] whose keys fall into ranges.

    Args:
        query: [B, H, 1, D], not rotated.
        key: [B, G, K, D], as it is cached.
        value: [B, G, K, Dv].
        turns: of the query for the pieces of `ranges`, in their order: [B or 1, 1, P, R/2].
        ranges: of all K keys, by their first one; of keys in several, which row takes which is known.
        mask: bool (True: attend) or additive, [B or 1, 1, 1, K or more]; None: all is seen.
        scaling: multiplies the scores.
    """
    turned = rotate(query.expand(-1, -1, len(ranges), -1), turns, ranges[0].piece.layout)  # [B, H, P, D]
    grouped = turned.unflatten(1, (value.shape[1], -1))  # [B, G, H/G, P, D]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores_so_far: list[Tensor] = []  # of adjoining keys
    end = 0
    for number, (piece, low, high, which) in enumerate(ranges):
        of_range = torch.matmul(
            grouped[:, :, :, number], piece.rotate_key(key[:, :, low:high], low, high).transpose(-1, -2)
        )
        if low < end:  # pieces before hold some of these keys in other rows
            before = scores_so_far[0] if len(scores_so_far) == 1 else torch.cat(scores_so_far, dim=-1)
            shared = min(high, end) - low
            if which is not None:
                in_range = which[:, None, :, :shared]
                of_shared = torch.where(in_range, of_range[..., :shared], before[..., low : low + shared])
            else:
                of_shared = of_range[..., :shared]
            scores_so_far = [before[..., :low], of_shared, before[..., low + shared :], of_range[..., shared:]]
        else:
            scores_so_far.append(of_range)
        end = max(end, high)
    scores = torch.cat(scores_so_far, dim=-1).to(wide).mul_(scaling)  # [B, G, H/G, K]
    if mask is not None:
        shown = mask[..., : scores.shape[-1]]
        scores = scores.masked_fill_(~shown, LOWEST) if mask.dtype == torch.bool else (scores + shown).clamp(min=LOWEST)
    chances = torch.softmax(scores, dim=-1).to(query.dtype)
    return torch.matmul(chances, value).flatten(1, 2)[:, None]  # [B, 1, H, Dv]
