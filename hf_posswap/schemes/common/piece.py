"""A piece of attention: the query-key pairs that share one rotation of queries and one of keys.

Schemes that treat near and far keys differently (Self-Extend, ReRoPE, dual chunk attention) are a few such pieces; a
softmax runs over all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hf_posswap.geometry import Layout
from hf_posswap.rope_math import CosSin, rotate, rotate_read, widest

Turn = Callable[[Tensor], CosSin]
Keys = Literal["raw", "rotated", "copies", "far"]
"""The form of the keys of a call: as projected; rotated once; rotated for each piece, side by side; rotated for the far
piece, from which the others re-rotate them."""


class LateTable:
    """Lazy cos and sin that re-rotate keys which are already rotated, computed for the requested range: few are near.

    They are the quotient of both rotations, so a re-rotated key equals a key rotated once, up to rounding in its dtype,
    and a scale is applied only once.

    Args:
        positions: of the keys, [B or 1, K].
        wanted: gives cos and sin of positions.
        had: gives those of the rotation that the keys already have.
    """

    def __init__(self, positions: Tensor, wanted: Turn, had: Turn) -> None:
        self.positions, self.wanted, self.had = positions, wanted, had
        self.last: tuple[object, CosSin] | None = None

    def of(self, start: int, stop: int, dtype: torch.dtype) -> CosSin:
        """Return tables of [B or 1, 1, stop - start, R/2] for keys of `dtype`."""
        requested, last = (start, stop, dtype), self.last
        if last is None or last[0] != requested:
            self.last = last = requested, self._compute(self.positions[:, start:stop], dtype)
        return last[1]

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> CosSin:
        wide = widest(positions.device)
        (a, b), (c, d) = ([x.to(wide) for x in turn(positions)] for turn in (self.wanted, self.had))
        cos, sin = a * c + b * d, b * c - a * d  # (a + bi) / (c + di), up to the squared length of c + di
        length = c * c + d * d
        result_dtype = torch.promote_types(dtype, torch.float32)
        return CosSin((cos / length).to(result_dtype), (sin / length).to(result_dtype))

    def part(self, rows: slice, keys: slice) -> LateTable:
        """Return the table restricted to some rows and keys."""
        positions = (self.positions if len(self.positions) == 1 else self.positions[rows])[:, keys]
        return LateTable(positions, self.wanted, self.had)


class LateCosSin:
    """Lazy cos and sin of queries, computed on first use: few calls show keys later than their query.

    Args:
        positions: of the queries, [B or 1, Q].
        wanted: gives cos and sin of positions.
    """

    def __init__(self, positions: Tensor, wanted: Turn) -> None:
        self.positions, self.wanted = positions, wanted
        self.computed: CosSin | None = None

    @property
    def table(self) -> CosSin:
        """Tables of [B or 1, 1, Q, R/2]."""
        if self.computed is None:  # no cached_property: torch.compile cannot trace its lock
            self.computed = self.wanted(self.positions)
        return self.computed

    @property
    def cos(self) -> Tensor:
        """Of the table."""
        return self.table.cos

    @property
    def sin(self) -> Tensor:
        """Of the table."""
        return self.table.sin


class Pairs(Protocol):
    """A set of query-key pairs, such as a `Region`."""

    def holds(self, query: Tensor, key: Tensor) -> Tensor:
        """Return which pairs of query positions [B or 1, Q, 1] and key positions [B or 1, 1, K] belong to it.

        bool [B or 1, Q, K].
        """


@dataclass(frozen=True)
class Piece:
    """Which pairs, and how their query and key are rotated.

    Attributes:
        query: rotates the queries, tables of [B or 1, 1, Q, R/2].
        key: rotates the keys, tables of [B or 1, 1, K, R/2]; None: they are already rotated.
        layout: how rotary pairs lie in a head.
        pairs: which belong here.
        copy: if there is no `key`: which of the `keys_per_token` keys of each token this piece takes.
        keys_per_token: how many keys of each token lie side by side.
    """

    query: CosSin | LateCosSin
    key: CosSin | LateTable | None
    layout: Layout
    pairs: Pairs
    copy: int = 0
    keys_per_token: int = 1

    @property
    def key_identity(self) -> tuple[int, int]:
        """Equal for pieces that share their keys, while they are alive."""
        return id(self.key), self.copy

    def rotate_query(self, query: Tensor, start: int, stop: int) -> Tensor:
        """Return queries `start` to `stop`, [B, H, stop - start, D], rotated for this piece."""
        return rotate(query, _rows(self.query, start, stop), self.layout)

    def part(self, rows: slice, queries: slice, keys: slice) -> Piece:
        """Return the piece restricted to some rows, queries and keys."""
        key = self.key
        if key is not None:
            key = key.part(rows, keys) if isinstance(key, LateTable) else _select(key, rows, keys)
        return replace(self, query=_select(self.query, rows, queries), key=key)

    def rotate_key(self, key: Tensor, start: int, stop: int) -> Tensor:
        """Return keys `start` to `stop`, [B, G, stop - start, keys_per_token D], rotated for this piece: [..., D]."""
        if self.key is None:
            return key.unflatten(-1, (self.keys_per_token, -1))[..., self.copy, :] if self.keys_per_token > 1 else key
        if isinstance(self.key, LateTable):
            return rotate_read(key, self.key.of(start, stop, key.dtype), self.layout)
        return rotate(key, _rows(self.key, start, stop), self.layout)


def pair_outside(mechanism: Any, length: int) -> tuple[int, int, int] | None:
    """Return the positions of a query and a key that belong to no piece or to several, and to how many; None: no such.

    Positions 0 to 31, and those around each power of two up to `length`, are tried against each other.

    Args:
        mechanism: one that splits attention.
        length: tokens that the model is to read.
    """
    around = {2**power + offset for power in range(5, length.bit_length()) for offset in (-1, 0, 1)}
    with torch.device("cpu"):  # a model may be built under another device, on meta too
        positions = torch.tensor([[*range(32), *sorted(around - set(range(32)))]])
        counts = torch.zeros(positions.shape[1], positions.shape[1], dtype=torch.long)
        for piece in mechanism.pieces(positions, positions):
            counts += piece.pairs.holds(positions[:, :, None], positions[:, None, :])[0]
        wrong = (counts != 1).nonzero()
    if not len(wrong):
        return None
    query, key = (int(index) for index in wrong[0])
    return int(positions[0, query]), int(positions[0, key]), int(counts[query, key])


def side_by_side(key: Tensor, tables: tuple[CosSin, ...], layout: Layout) -> Tensor:
    """Return `key` [B, G, K, D] rotated by each of `tables`, side by side: [B, G, K, keys_per_token D].

    One key, a step of decoding, is rotated by all tables at once: calls cost more there than their arithmetic.

    Example:
        >>> import torch
        >>> still, quarter = (CosSin(torch.tensor([[[[c]]]]), torch.tensor([[[[1.0 - c]]]])) for c in (1.0, 0.0))
        >>> side_by_side(torch.tensor([[[[1.0, 2.0]]]]), (still, quarter), "half")
        tensor([[[[ 1.,  2., -2.,  1.]]]])
    """
    if key.shape[2] == 1 and not torch.compiler.is_compiling():
        return rotate(key.expand(-1, -1, len(tables), -1), in_a_row(tables), layout).flatten(2).unsqueeze(2)
    return torch.cat([rotate(key, table, layout) for table in tables], dim=-1)


def in_a_row(tables: tuple[CosSin, ...]) -> CosSin:
    """Return tables of one token each, [B or 1, 1, 1, R/2], in the places of tokens: [B or 1, 1, P, R/2].

    It is cached with the first table, for the very same others: with itself in it, it would live until garbage is
    collected.
    """
    cache, others = tables[0].__dict__, tables[1:]
    known, row = cache.get("row", ((), None))
    if row is None or len(known) != len(others) or any(a is not b for a, b in zip(known, others, strict=True)):
        cos, sin = (torch.cat([getattr(table, name) for table in tables], dim=2) for name in ("cos", "sin"))
        row = CosSin(cos, sin)
        cache["row"] = others, row
    return row


def _select(table: CosSin | LateCosSin, rows: slice, tokens: slice) -> CosSin:
    cos, sin = (x[:, :, tokens] if len(x) == 1 else x[rows, :, tokens] for x in (table.cos, table.sin))
    return CosSin(cos, sin)


def _rows(table: CosSin | LateCosSin, start: int, stop: int) -> CosSin:
    table = table.table if isinstance(table, LateCosSin) else table
    if not torch.compiler.is_compiling() and (start, stop) == (0, table.cos.shape[-2]):
        return table  # with what it keeps for all layers
    return CosSin(table.cos[..., start:stop, :], table.sin[..., start:stop, :])
