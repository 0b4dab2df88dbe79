"""Points for what other packages register: a plan, a mechanism, a formula, the traits that no model shows.

This repository has its own tests of them: `tests/schemes` with an oracle for each scheme, `tests/patching/plan`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import PositionRangeError, UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.mechanism import Mechanism, by_head
from hf_posswap.testing.contract.checks import BrokenPromiseError, check, check_same, raises
from hf_posswap.testing.contract.pairs import Pair, words
from hf_posswap.testing.contract.point import point

FAR = 10**8
"""A position that no scheme with an end reaches."""
SCORES = 1e-4
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
    mechanism = scheme.mechanism(geometry)
    generator = torch.Generator().manual_seed(3)
    queries, keys = (torch.randn(geometry.num_heads, 6, geometry.head_dim, generator=generator) for _ in range(2))
    at = torch.tensor([0, 1, 2, 5, 11, 30])
    with torch.no_grad():
        scores = scores_of(mechanism, geometry, queries, keys, at)
    for head in range(geometry.num_heads):
        for i, query in enumerate(at.tolist()):
            for j, key in enumerate(at.tolist()[: i + 1]):
                stated = float(scheme.formula(geometry, head, queries[head, i], keys[head, j], query, key))
                seen = float(scores[head, i, j])
                where = f"head {head}, a query at {query} and a key at {key}"
                holds = abs(seen - stated) <= SCORES * max(1.0, abs(stated))
                check(holds, f"the score {stated:.6g} of the formula for {where}", f"{seen:.6g}")


def scores_of(mechanism: Mechanism, geometry: Geometry, queries: Tensor, keys: Tensor, at: Tensor) -> Tensor:
    """Return the scores of `queries` and `keys` [H, Q, D] at the positions `at` [Q], [H, Q, Q].

    Raises:
        BrokenPromiseError: the mechanism splits attention, for which no formula of one score is enough.
    """
    if mechanism.splits:
        raise BrokenPromiseError("a formula of a scheme that does not split attention", "one that splits it")
    positions = at[None]
    query, key = queries[None], keys[None]
    if mechanism.rotates:
        prepared = mechanism.prepare(positions, (positions.amax(dim=1) + 1)[:, None, None, None])
        query = mechanism.rotate_query(query, prepared)
        groups = geometry.num_heads // geometry.num_kv_heads
        rotated = [mechanism.rotate_key(key[:, n::groups], prepared) for n in range(groups)]
        key = torch.stack(rotated, dim=2).flatten(1, 2)
    if mechanism.scales:
        query = query * by_head(mechanism.scale(positions))[..., None]
    scores = query @ key.transpose(2, 3) / geometry.head_dim**0.5
    if mechanism.biases:
        scores = scores + mechanism.bias(positions, positions)
    return scores[0]


@point(lambda pair: acts_inside(pair) and pair.traits.shardable)
def a_token_needs_its_own_position_alone(pair: Pair) -> None:
    """A shardable scheme needs each token's own position alone: no bias, the same rotation in any part of a text."""
    geometry = pair.at.geometry
    mechanism = pair.plan.scheme.mechanism(geometry)
    parts = [module for module in mechanism.modules() if isinstance(module, Mechanism)]
    adds = [type(module).__name__ for module in parts if module.biases or module.splits]
    check(not adds, "a mechanism without bias and without split attention: the traits say shardable=True", adds)
    if not mechanism.rotates:
        return
    positions = torch.arange(8)[None]
    query = torch.randn(1, geometry.num_heads, 8, geometry.head_dim, generator=torch.Generator().manual_seed(4))

    def rotated(start: int, stop: int, length: int) -> Tensor:
        prepared = mechanism.prepare(positions[:, start:stop], torch.tensor(length).view(1, 1, 1, 1))
        return mechanism.rotate_query(query[:, :, start:stop], prepared)

    with torch.no_grad():
        whole = rotated(0, 8, 4 * geometry.original_length)
        shard = rotated(4, 8, 8)
    check_same(shard, whole[:, :, 4:], 1e-5, "the rotation of a token in a shard as in the whole text")


@point(lambda pair: acts_inside(pair) and pair.placed and not pair.traits.unbounded)
def a_scheme_with_an_end_says_so(pair: Pair) -> None:
    """A scheme that is not unbounded raises PositionRangeError beyond its end."""
    with raises(PositionRangeError):
        pair.logits(pair.specimen(), words(1, 1), position_ids=torch.tensor([[FAR]]))
