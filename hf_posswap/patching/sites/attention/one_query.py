"""Attention in pieces of one query: what a step of decoding costs, in the fewest calls.

The query is rotated for all pieces at once, and the keys of each piece, which lie side by side, are read where they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_posswap.rope_math import CosSin, rotate
from hf_posswap.schemes.common.piece import Piece


class Turns(NamedTuple):
    """The rotations of one query for several pieces.

    Attributes:
        table: of [B or 1, 1, P, R/2]: the pieces stand where tokens do.
        layout: how rotary pairs lie in a head.
    """

    table: CosSin
    layout: Any


def turns_of(pieces: Sequence[Piece]) -> Turns:
    """Return the rotations of the one query that `pieces` are for."""
    cos, sin = (torch.cat([getattr(piece.query, name) for piece in pieces], dim=2) for name in ("cos", "sin"))
    return Turns(CosSin(cos, sin), pieces[0].layout)


def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    turns: Turns,
    ranges: Sequence[tuple[Piece, int, int]],
    mask: Tensor | None,
    *,
    scaling: float,
) -> Tensor:
    """Return attention of one query [B, 1, H, Dv] whose keys fall into ranges, one after the other.

    Args:
        query: [B, H, 1, D], not rotated.
        key: [B, G, K, D], as it is cached.
        value: [B, G, K, Dv].
        turns: of the pieces in `ranges`, in their order.
        ranges: a piece, the first of its keys, and the one after the last.
        mask: bool (True: attend) or additive, [B or 1, 1, 1, K]; None: all is seen.
        scaling: multiplies the scores.
    """
    groups = value.shape[1]
    turned = rotate(query.expand(-1, -1, len(ranges), -1), turns.table, turns.layout)  # [B, H, P, D]
    grouped = turned.unflatten(1, (groups, -1))  # [B, G, H/G, P, D]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores_by_region = [
        torch.matmul(grouped[:, :, :, number], piece.rotate_key(key[:, :, low:high], low, high).transpose(-1, -2))
        for number, (piece, low, high) in enumerate(ranges)
    ]
    scores = torch.cat(scores_by_region, dim=-1).to(wide).mul_(scaling)  # [B, G, H/G, K]
    if mask is not None:
        lowest = torch.finfo(torch.float32).min
        shown = mask[..., : scores.shape[-1]]
        scores = scores.masked_fill_(~shown, lowest) if mask.dtype == torch.bool else (scores + shown).clamp(min=lowest)
    chances = torch.softmax(scores, dim=-1).to(query.dtype)
    return torch.matmul(chances, value).flatten(1, 2)[:, None]  # [B, 1, H, Dv]
