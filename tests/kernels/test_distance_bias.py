"""A bias by distance through a view, and any bias in blocks: against the dense bias in float64, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posswap.kernels import blockwise
from hf_posswap.kernels.blockwise import attend_by_distance, attend_made
from tests.kernels.gradients import same_with_gradients

SCALING = 0.3


def dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """Return attention from all scores, with `bias` [1 or B, H, Q, K] and what `seen` [.., Q, K] leaves."""
    share = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(share, dim=1).transpose(-1, -2) * SCALING + bias
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(share, dim=1)


def noise(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def tensors(heads: int, groups: int, length: int, keys: int | None = None) -> list[Tensor]:
    keys = keys or length
    return [noise(2, heads, length, 8), noise(2, groups, keys, 8), noise(2, groups, keys, 8)]


@settings(max_examples=30)
@given(
    length=st.integers(1, 30),
    block=st.integers(1, 14),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)]),
    causal=st.booleans(),
    learned=st.booleans(),
)
def test_a_bias_by_distance(length: int, block: int, heads: tuple[int, int], causal: bool, learned: bool) -> None:
    qkv = tensors(*heads, length)
    by_distance = noise(heads[0], length if causal else 2 * length - 1).detach().requires_grad_(learned)
    with patch.multiple(blockwise, BLOCK=block, LEARNED_BLOCK=block):
        found = attend_by_distance(*qkv, by_distance, scaling=SCALING, causal=causal)
        away = torch.arange(length)[:, None] - torch.arange(length)
        bias = by_distance[:, away.clamp(min=0) if causal else away + length - 1]
        seen = away >= 0 if causal else torch.ones_like(away, dtype=torch.bool)
        same_with_gradients(found, dense(*qkv, bias, seen), [*qkv, *([by_distance] if learned else [])])


def padded(length: int, keys: int) -> Tensor:
    """Return a mask, [2, 1, Q, K], of a causal pair of rows, one with padding on the left, of the last Q of K."""
    at = torch.arange(keys)
    seen = (at <= at[-length:, None])[None, None].repeat(2, 1, 1, 1)
    seen[1, :, :, : (keys - length) // 2] = False
    return seen


@settings(max_examples=20)
@given(
    length=st.integers(1, 20),
    past=st.sampled_from([0, 5]),
    pairs=st.sampled_from([1, 60, 10_000]),
    masked=st.sampled_from(["causal", "bool", "additive", "both sides"]),
)
def test_any_bias_with_any_mask(length: int, past: int, pairs: int, masked: str) -> None:
    keys = length + (past if masked in ("bool", "additive") else 0)
    qkv = tensors(4, 2, length, keys)
    weight, at = noise(4), torch.rand(2, keys, dtype=torch.float64)  # positions of its own in each row

    def make(rows: slice, queries: slice, columns: slice) -> Tensor:
        away = at[rows, -length:][:, queries, None] - at[rows, None, columns]
        return (weight[:, None, None] * away[:, None]).sin()

    seen = padded(length, keys) if masked != "both sides" else torch.ones(2, 1, length, keys, dtype=torch.bool)
    if masked == "causal":
        seen = seen[:1]
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    given_mask = {"bool": seen, "additive": added}.get(masked)
    with patch.multiple(blockwise, PAIRS=pairs, LEAST_ROWS=1):
        found = attend_made(*qkv, make, [weight], given_mask, scaling=SCALING, causal=masked == "causal")
        same_with_gradients(found, dense(*qkv, make(slice(None), slice(None), slice(None)), seen), [*qkv, weight])


def distant(dtype: torch.dtype) -> Tensor:
    by_distance = -torch.arange(600.0, dtype=torch.float64).add(1).log() * torch.tensor([[0.5], [20.0]])
    qkv = [x.detach().to(dtype) for x in tensors(2, 1, 600)]
    away = torch.arange(600)[:, None] - torch.arange(600)
    exact = dense(*(x.double() for x in qkv), by_distance[:, away.clamp(min=0)], away >= 0)
    found = attend_by_distance(*qkv, by_distance.float(), scaling=SCALING, causal=True)
    assert found.dtype == dtype
    return (found.double() - exact).abs().max()


def test_float32_errs_as_a_softmax_does() -> None:
    assert distant(torch.float32) < 1e-5


def test_bfloat16_keeps_the_bias_in_float32() -> None:
    assert distant(torch.bfloat16) < 4 * 2**-8 * 3


@pytest.mark.parametrize("run", ["distance", "made"])
def test_a_learned_bias_alone_gets_its_gradient(run: str) -> None:
    """Frozen projections, trained bias: as LoRA on other modules has it."""
    qkv = [x.detach() for x in tensors(2, 2, 9)]
    bias = noise(2, 9)
    away = torch.arange(9)[:, None] - torch.arange(9)
    whole: Callable[[], Tensor] = lambda: bias[:, away.clamp(min=0)]  # noqa: E731
    if run == "distance":
        found = attend_by_distance(*qkv, bias, scaling=SCALING, causal=True)
    else:
        found = attend_made(
            *qkv, lambda _, rows, keys: whole()[None, :, rows, keys], [bias], None, scaling=SCALING, causal=True
        )
    same_with_gradients(found, dense(*qkv, whole(), away >= 0), [bias])
