"""The scores of a mechanism by itself, without a model, and whether a token needs more than its own position."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posswap.geometry import Geometry
from hf_posswap.schemes import Mechanism, Scheme
from hf_posswap.schemes.mechanism import by_head


def scores(mechanism: Mechanism, query: Tensor, key: Tensor, positions: Tensor, length: Tensor) -> Tensor:
    """Return the attention scores [B, H, Q, Q] of `query` [B, H, Q, D] and `key` [B, G, Q, D], both at `positions`.

    Args:
        mechanism: of a scheme.
        query: the queries.
        key: the keys; G divides H.
        positions: of both, [B or 1, Q].
        length: tokens seen so far, per row, [B or 1, 1, 1, 1].
    """
    raw_query, raw_key = query, key
    if mechanism.rotates:
        prepared = mechanism.prepare(positions, length)
        query, key = mechanism.rotate_query(query, prepared), mechanism.rotate_key(key, prepared)
    result = _products(query, key)
    for piece in mechanism.pieces(positions, positions) if mechanism.splits else ():
        count = query.shape[2]
        turned = _products(piece.rotate_query(raw_query, 0, count), piece.rotate_key(raw_key, 0, count))
        held = piece.pairs.holds(positions[:, :, None], positions[:, None, :])[:, None]
        result = torch.where(held, turned, result)
    if mechanism.scales:
        result = result * by_head(mechanism.scale(positions))[..., None]
    return result + mechanism.bias(positions, positions) if mechanism.biases else result


def _products(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT / query.shape[-1] ** 0.5


def rows(*lengths: int) -> Tensor:
    """Return the lengths of rows as mechanisms take them, [B, 1, 1, 1]."""
    return torch.tensor(lengths)[:, None, None, None]


def is_local(scheme: Scheme, geometry: Geometry) -> bool:
    """Return whether each token needs its own position alone: in a part of a text it gets what it does in the whole.

    Args:
        scheme: resolved.
        geometry: of a model of original length 64 or less.
    """
    whole, part_of_it = torch.arange(150)[None], torch.arange(40)[None]
    local = True
    for part in scheme.mechanism(geometry).modules() if scheme.acts_inside else ():
        if isinstance(part, Mechanism) and part.rotates and not part.splits:
            pairs = zip(part.prepare(whole, rows(150)), part.prepare(part_of_it, rows(40)), strict=True)
            local &= all(not isinstance(a, Tensor) or torch.equal(a[..., :40, :], b) for a, b in pairs)
        local &= not isinstance(part, Mechanism) or not (part.biases or part.splits)
    return local
