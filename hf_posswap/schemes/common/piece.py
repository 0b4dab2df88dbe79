"""A piece of attention: the pairs of queries and keys that one pair of rotations serves.

Schemes that treat near and far keys differently (Self-Extend, ReRoPE, dual chunk attention) are a few such pieces; a
softmax runs over all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hf_posswap.geometry import Layout
from hf_posswap.rope_math import CosSin, rotate, widest

Turn = Callable[[Tensor], CosSin]
Keys = Literal["raw", "rotated", "copies", "far"]
"""How the keys of a call come: as they were projected; rotated once and for all; rotated for each piece, side by side;
rotated for the far piece, from which the others turn on."""


class LateTable:
    """What turns keys on that are turned already, made for the range of them that is asked for: few are near.

    It is the quotient of both turns, so that keys that are turned twice are those that are turned once, to a rounding
    of their dtype, and what scales them is in them once.

    Args:
        positions: of the keys, [B or 1, K].
        wanted: gives cos and sin of positions.
        had: gives those of the turn that the keys have.
    """

    def __init__(self, positions: Tensor, wanted: Turn, had: Turn) -> None:
        self.positions, self.wanted, self.had = positions, wanted, had
        self.last: tuple[Any, CosSin] | None = None

    def of(self, start: int, stop: int, dtype: torch.dtype) -> CosSin:
        """Return tables of [B or 1, 1, stop - start, R/2] for keys of `dtype`."""
        asked, last = (start, stop, dtype), self.last
        if last is None or last[0] != asked:
            self.last = last = asked, self._made(self.positions[:, start:stop], dtype)
        return last[1]

    def _made(self, positions: Tensor, dtype: torch.dtype) -> CosSin:
        wide = widest(positions.device)
        (a, b), (c, d) = ([x.to(wide) for x in turn(positions)] for turn in (self.wanted, self.had))
        cos, sin = a * c + b * d, b * c - a * d  # (a + bi) / (c + di), but for the length of c + di, squared
        length = c * c + d * d
        kept = torch.promote_types(dtype, torch.float32)
        return CosSin((cos / length).to(kept), (sin / length).to(kept))

    def part(self, rows: slice, keys: slice) -> LateTable:
        """Return the table of some rows and keys alone."""
        positions = (self.positions if len(self.positions) == 1 else self.positions[rows])[:, keys]
        return LateTable(positions, self.wanted, self.had)


class LateCosSin:
    """What turns queries, made where it is asked for: few calls show keys that stand later than their query.

    Args:
        positions: of the queries, [B or 1, Q].
        wanted: gives cos and sin of positions.
    """

    def __init__(self, positions: Tensor, wanted: Turn) -> None:
        self.positions, self.wanted = positions, wanted
        self.made: CosSin | None = None

    @property
    def table(self) -> CosSin:
        """Tables of [B or 1, 1, Q, R/2]."""
        if self.made is None:  # no cached_property: torch.compile cannot trace its lock
            self.made = self.wanted(self.positions)
        return self.made

    @property
    def cos(self) -> Tensor:
        """Of the table."""
        return self.table.cos

    @property
    def sin(self) -> Tensor:
        """Of the table."""
        return self.table.sin


class Pairs(Protocol):
    """Some pairs of a query and a key; a `Region` is such."""

    def holds(self, query: Tensor, key: Tensor) -> Tensor:
        """Return which pairs of query positions [B or 1, Q, 1] and key positions [B or 1, 1, K] these are.

        bool [B or 1, Q, K].
        """


@dataclass(frozen=True)
class Piece:
    """Which pairs, and how their query and key are rotated.

    Attributes:
        query: rotates the queries, tables of [B or 1, 1, Q, R/2].
        key: rotates the keys, tables of [B or 1, 1, K, R/2]; None: they come as they are to be used.
        layout: how rotary pairs lie in a head.
        pairs: which belong here.
        copy: where there is no `key`: which of the `keys_per_token` keys of each token this piece takes.
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
        """By which pieces know that they have their keys in common, as long as they live."""
        return id(self.key), self.copy

    def rotate_query(self, query: Tensor, start: int, stop: int) -> Tensor:
        """Return queries `start` to `stop`, [B, H, stop - start, D], rotated for this piece."""
        return rotate(query, _rows(self.query, start, stop), self.layout)

    def part(self, rows: slice, queries: slice, keys: slice) -> Piece:
        """Return the piece of some rows, queries and keys alone."""
        key = self.key
        if key is not None:
            key = key.part(rows, keys) if isinstance(key, LateTable) else _part(key, rows, keys)
        return replace(self, query=_part(self.query, rows, queries), key=key)

    def rotate_key(self, key: Tensor, start: int, stop: int) -> Tensor:
        """Return keys `start` to `stop`, [B, G, stop - start, keys_per_token D], rotated for this piece: [..., D]."""
        if self.key is None:
            return key.unflatten(-1, (self.keys_per_token, -1))[..., self.copy, :] if self.keys_per_token > 1 else key
        table = self.key.of(start, stop, key.dtype) if isinstance(self.key, LateTable) else _rows(self.key, start, stop)
        return rotate(key, table, self.layout)


def side_by_side(key: Tensor, tables: Sequence[CosSin], layout: Layout) -> Tensor:
    """Return `key` [B, G, K, D] rotated by each of `tables`, side by side: [B, G, K, keys_per_token D].

    Example:
        >>> import torch
        >>> still, quarter = (CosSin(torch.tensor([[[[c]]]]), torch.tensor([[[[1.0 - c]]]])) for c in (1.0, 0.0))
        >>> side_by_side(torch.tensor([[[[1.0, 2.0]]]]), (still, quarter), "half")
        tensor([[[[ 1.,  2., -2.,  1.]]]])
    """
    return torch.cat([rotate(key, table, layout) for table in tables], dim=-1)


def _part(table: CosSin | LateCosSin, rows: slice, tokens: slice) -> CosSin:
    cos, sin = (x[:, :, tokens] if len(x) == 1 else x[rows, :, tokens] for x in (table.cos, table.sin))
    return CosSin(cos, sin)


def _rows(table: CosSin | LateCosSin, start: int, stop: int) -> CosSin:
    return CosSin(table.cos[..., start:stop, :], table.sin[..., start:stop, :])
