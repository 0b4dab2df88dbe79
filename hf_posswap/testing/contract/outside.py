"""Points for what other packages register: a plan, a mechanism, a formula, the traits that no model shows.

This repository has its own tests of them: `tests/schemes` with an oracle for each scheme, `tests/patching/plan`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import PositionRangeError, UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import Mechanism, Scheme
from hf_posswap.schemes.mechanism import by_head
from hf_posswap.testing.contract.checks import BrokenPromiseError, check, raises
from hf_posswap.testing.contract.pairs import Pair, words
from hf_posswap.testing.contract.point import point


def scores(mechanism: Mechanism, query: Tensor, key: Tensor, positions: Tensor, length: Tensor) -> Tensor:
    """Return the attention scores [B, H, Q, Q] of `query` [B, H, Q, D] and `key` [B, G, Q, D], both at `positions`.

    Args:
        mechanism: of a scheme.
        query: the queries.
        key: the keys; G divides H.
        positions: of both, [B or 1, Q].
        length: tokens seen so far, per row, [B or 1, 1, 1, 1].
    """
    if mechanism.rotates:  # pieces then take keys as a cache holds them
        prepared = mechanism.prepare(positions, length)
        query, key = mechanism.rotate_query(query, prepared), mechanism.rotate_key(key, prepared)
    result = _products(query, key)
    for piece in mechanism.pieces(positions, positions) if mechanism.splits else ():
        count = query.shape[2]
        turned = _products(piece.rotate_query(query, 0, count), piece.rotate_key(key, 0, count))
        is_inside = piece.pairs.holds(positions[:, :, None], positions[:, None, :])[:, None]
        result = torch.where(is_inside, turned, result)
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


FAR = 10**8
"""A position that no scheme with an end reaches."""
ROUNDING = 1e-4
"""The largest difference of a score from that of a formula, by float32 rounding."""


@point()
def the_scheme_is_planned_or_refused_with_a_reason(pair: Pair) -> None:
    """The scheme is planned, its mechanism giving the right shapes and dtypes, or refused with a reason."""
    try:
        check(pair.plan.scheme is not None, "a plan with a scheme", "none")
    except UnsupportedSwapError as error:
        check("What works:" in str(error), "a refusal that says what works", error)
    except Exception as error:  # arbitrary code of a scheme
        raise BrokenPromiseError(
            "a plan, or UnsupportedSwapError with a reason", f"{type(error).__name__}: {error}"
        ) from error


def acts_inside(pair: Pair) -> bool:
    """Return whether the scheme gives attention a mechanism."""
    return pair.plan.route == "plugin" and pair.plan.scheme.acts_inside and not pair.plan.scheme.keeps_native


def states_formula(pair: Pair) -> bool:
    """Return whether the scheme states the formula of its scores, by a method `formula`."""
    return acts_inside(pair) and hasattr(pair.plan.scheme, "formula")


@point(states_formula)
def the_scores_are_those_of_the_formula(pair: Pair) -> None:
    """The scores of attention are those of the formula that the scheme states, one query and one key at a time."""
    scheme: Any = pair.plan.scheme
    geometry = pair.at.geometry
    generator, at = torch.Generator().manual_seed(3), torch.tensor([0, 1, 2, 5, 11, 30])
    query = torch.randn(1, geometry.num_heads, len(at), geometry.head_dim, generator=generator)
    key = torch.randn(1, geometry.num_kv_heads, len(at), geometry.head_dim, generator=generator)
    with torch.no_grad():
        actual = scores(scheme.mechanism(geometry), query, key, at[None], rows(int(at.max()) + 1))
    groups = geometry.num_heads // geometry.num_kv_heads
    for head in range(geometry.num_heads):
        for i, later in enumerate(at.tolist()):
            for j, earlier in enumerate(at.tolist()[: i + 1]):
                stated = float(
                    scheme.formula(geometry, head, query[0, head, i], key[0, head // groups, j], later, earlier)
                )
                seen = float(actual[0, head, i, j])
                where = f"head {head}, a query at {later} and a key at {earlier}"
                holds = abs(seen - stated) <= ROUNDING * max(1.0, abs(stated))
                check(holds, f"the score {stated:.6g} of the formula for {where}", f"{seen:.6g}")


@point(lambda pair: acts_inside(pair) and pair.traits.shardable)
def a_token_needs_its_own_position_alone(pair: Pair) -> None:
    """A shardable scheme needs each token's own position alone: no bias, the same rotation in any part of a text."""
    local = is_local(pair.plan.scheme, pair.at.geometry)
    expected = "a mechanism without a bias, which rotates a token alike in a part of a text and in the whole"
    check(local, f"{expected}: the traits say shardable=True", "a bias, split attention, or another rotation")


@point(lambda pair: acts_inside(pair) and pair.placed and not pair.traits.unbounded)
def a_scheme_with_an_end_says_so(pair: Pair) -> None:
    """A scheme that is not unbounded raises PositionRangeError beyond its end."""
    with raises(PositionRangeError):
        pair.logits(pair.specimen(), words(1, 1), position_ids=torch.tensor([[FAR]]))
