"""A piece of attention: the pairs of queries and keys that one pair of rotations serves.

Schemes that treat near and far keys differently (Self-Extend, ReRoPE, dual chunk attention) are a few such pieces; a
softmax runs over all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hf_posswap.geometry import Layout
from hf_posswap.rope_math import CosSin, rotate


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
        key: rotates the keys, tables of [B or 1, 1, K, R/2]; None: they come from the cache as they are to be used.
        layout: how rotary pairs lie in a head.
        pairs: which belong here.
        copy: where there is no `key`: which of the `keys_per_token` keys of each token this piece takes.
        keys_per_token: how many keys of each token lie side by side.
    """

    query: CosSin
    key: CosSin | None
    layout: Layout
    pairs: Pairs
    copy: int = 0
    keys_per_token: int = 1

    def rotate_query(self, query: Tensor, start: int, stop: int) -> Tensor:
        """Return queries `start` to `stop`, [B, H, stop - start, D], rotated for this piece."""
        return rotate(query, _rows(self.query, start, stop), self.layout)

    def part(self, rows: slice, queries: slice, keys: slice) -> Piece:
        """Return the piece of some rows, queries and keys alone."""
        query = _part(self.query, rows, queries)
        return replace(self, query=query, key=None if self.key is None else _part(self.key, rows, keys))

    def rotate_key(self, key: Tensor, start: int, stop: int) -> Tensor:
        """Return keys `start` to `stop`, [B, G, stop - start, keys_per_token D], rotated for this piece: [..., D]."""
        if self.key is None:
            return key.unflatten(-1, (self.keys_per_token, -1))[..., self.copy, :] if self.keys_per_token > 1 else key
        return rotate(key, _rows(self.key, start, stop), self.layout)


def side_by_side(key: Tensor, tables: Sequence[CosSin], layout: Layout) -> Tensor:
    """Return `key` [B, G, K, D] rotated by each of `tables`, side by side: [B, G, K, keys_per_token D].

    Example:
        >>> import torch
        >>> still, quarter = (CosSin(torch.tensor([[[[c]]]]), torch.tensor([[[[1.0 - c]]]])) for c in (1.0, 0.0))
        >>> side_by_side(torch.tensor([[[[1.0, 2.0]]]]), (still, quarter), "half")
        tensor([[[[ 1.,  2., -2.,  1.]]]])
    """
    return torch.cat([rotate(key, table, layout) for table in tables], dim=-1)


def _part(table: CosSin, rows: slice, tokens: slice) -> CosSin:
    cos, sin = (x[:, :, tokens] if len(x) == 1 else x[rows, :, tokens] for x in (table.cos, table.sin))
    return CosSin(cos, sin)


def _rows(table: CosSin, start: int, stop: int) -> CosSin:
    return CosSin(table.cos[..., start:stop, :], table.sin[..., start:stop, :])
