"""ALiBi as a bias of one number a key: against the dense penalty in float64, forward and backward."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posswap.kernels import row_bias
from hf_posswap.kernels.row_bias import attend_linear
from hf_posswap.kernels.segments import whole
from hf_posswap.schemes.alibi import slopes

EXACT = 1e-12
"""Between sums of float64 in another order."""
SCALING = 0.25


def dense(query: Tensor, key: Tensor, value: Tensor, slope: Tensor, scaling: float) -> Tensor:
    """Return what `attend_linear` does, from all scores."""
    share, at = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
    away = at[:, None] - at
    scores = query @ key.repeat_interleave(share, dim=1).transpose(-1, -2) * scaling
    scores = (scores - slope[:, None, None] * away).masked_fill(away < 0, -torch.inf)
    return scores.softmax(-1) @ value.repeat_interleave(share, dim=1)


def tensors(heads: int, groups: int, length: int, width: int = 8) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = [(2, length, number, width) for number in (heads, groups, groups)]
    made = [torch.randn(shape, generator=source, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    return [*made, torch.tensor(slopes(heads), dtype=torch.float64)]


@settings(max_examples=30)
@given(
    length=st.integers(1, 40),
    block=st.integers(1, 16),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (6, 2)]),
    windowed=st.booleans(),
    steeper=st.sampled_from([1, 16, 64]),
)
def test_it_equals_the_penalty_written_out(
    length: int, block: int, heads: tuple[int, int], windowed: bool, steeper: int
) -> None:
    query, key, value, slope = tensors(*heads, length)
    slope *= steeper  # 16 and more: windows of a few keys, which differ by head
    leaves = [x.requires_grad_() for x in (query, key, value)]
    with patch.object(row_bias, "BLOCK", block), patch.object(row_bias, "SMALLEST", min(4, block)):
        found = attend_linear(query, key, value, slope, scaling=0.3, windowed=windowed)
    expected = dense(query, key, value, slope, 0.3)
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)
    weight = torch.randn_like(found)
    ours = torch.autograd.grad((found * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=EXACT, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_window_leaves_out_keys_and_no_digit(dtype: torch.dtype) -> None:
    query, key, value, slope = tensors(8, 4, 600)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    exact = dense(query.double(), key.double(), value.double(), slope, 0.1)
    seen = whole(2, 600, 600, causal=True)
    with patch.object(row_bias, "BLOCK", 64):
        windows = row_bias.windows_of(query, key, slope, seen, 0.1)
        found = attend_linear(query, key, value, slope, scaling=0.1, windowed=True)
    heads = [keys for first, stop, keys in windows for _ in range(first, stop)]
    assert heads[0] <= 256 < 600 == heads[-1], "steep heads see less, flat ones all"
    assert heads == sorted(heads)
    assert 0 < row_bias.skipped(windows, seen) == 1 - sum(heads) / (8 * 600)
    bound = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    assert (found.double() - exact).abs().max() < bound


@pytest.mark.parametrize("scaling", [0.5, 1.0, 2.0])
def test_a_window_holds_for_the_worst_scores(scaling: float) -> None:
    """One far key scores as high as the norms allow, and all others, each query's own too, as low."""
    far, length, slope = 40, 400, torch.tensor([0.5], dtype=torch.float64)
    query, key = (torch.zeros(1, 1, length, 4) for _ in range(2))
    query[..., 0], key[..., 0] = 3.0, -3.0
    key[0, 0, far, 0] = 3.0
    value = torch.randn(1, 1, length, 4, generator=torch.Generator().manual_seed(0))
    with patch.object(row_bias, "BLOCK", 16), patch.object(row_bias, "SMALLEST", 16):
        ((_, _, keys),) = row_bias.windows_of(query, key, slope, whole(1, length, length, causal=True), scaling)
        found = attend_linear(query, key, value, slope, scaling=scaling, windowed=True)
    assert keys < length
    exact = dense(query.double(), key.double(), value.double(), slope, scaling)
    torch.testing.assert_close(found.double(), exact, atol=2e-6, rtol=0)


@pytest.mark.parametrize("lost", [torch.inf, torch.nan])
def test_scores_that_nothing_bounds_leave_out_no_key(lost: float) -> None:
    query, key, _, slope = tensors(4, 2, 100)
    key[1, 1, 7, 3] = lost
    windows = row_bias.windows_of(query, key, 64 * slope, whole(2, 100, 100, causal=True), 0.3)
    assert [keys for _, stop, keys in windows if stop > 2] == [100]


@pytest.mark.parametrize("windowed", [False, True])
def test_a_slope_of_zero_is_no_penalty(windowed: bool) -> None:
    query, key, value, _ = tensors(4, 2, 50)
    slope = torch.tensor([0.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    with patch.object(row_bias, "BLOCK", 16), patch.object(row_bias, "SMALLEST", 8):
        found = attend_linear(query, key, value, slope, scaling=0.3, windowed=windowed)
    torch.testing.assert_close(found, dense(query, key, value, slope, 0.3), atol=EXACT, rtol=0)


@pytest.mark.parametrize("steepest", [0.7, 3.1, 11.3, 299.9])
def test_steep_slopes_cost_no_digits(steepest: float) -> None:
    """m j is rounded as where the paper's steepest slope is: by 3e-5 at most for each of two keys, below 1024."""
    length = 2048
    source = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, length, 2, 16, generator=source).transpose(1, 2) for _ in range(3))
    slope = torch.tensor([steepest, 2**-8])
    with torch.no_grad():
        found = attend_linear(query, key, value, slope, scaling=SCALING)
    exact = dense(query.double(), key.double(), value.double(), slope.double(), SCALING)
    assert (found.double() - exact).abs().max() < 6e-5 * float(value.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_into_a_text_it_errs_no_more_than_near_its_start(dtype: torch.dtype) -> None:
    """The last queries of a text of 16k tokens: m j itself would have lost 3e-4 here."""
    length, last = 16384, 32
    source = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, length, 2, 16, generator=source).transpose(1, 2).to(dtype) for _ in range(3))
    slope = torch.tensor([0.5, 2**-8])
    with torch.no_grad():
        found = attend_linear(query, key, value, slope, scaling=SCALING)[:, :, -last:]
        away = torch.arange(length - last, length)[:, None] - torch.arange(length)
        scores = query[:, :, -last:].double() @ key.double().transpose(-1, -2) * SCALING
        scores = (scores - slope[:, None, None].double() * away).masked_fill(away < 0, -torch.inf)
        exact = scores.softmax(-1) @ value.double()
    bound = 2e-5 if dtype == torch.float32 else 2 * 2**-8 * float(exact.abs().max())
    assert (found.double() - exact).abs().max() < bound


def test_the_bias_is_never_of_a_short_dtype() -> None:
    """In bfloat16 a row m j, or the same folded into one more dimension of q and k, is wrong by units."""
    calls = row_bias.linear_calls(torch.tensor([0.5]), whole(1, 4096, 4096, causal=True), with_gradients=False)
    query, key, value, _ = (x.bfloat16() for x in tensors(1, 1, 2048))
    seen = []
    with patch.object(row_bias, "attend", lambda pairs, value, calls, scaling: seen.extend(calls)):
        attend_linear(query, key, value, torch.tensor([0.5]).bfloat16(), scaling=0.3)
    biases = [call.bias for call in [*calls, *seen]]
    assert biases
    assert all(bias is not None and bias.dtype == torch.float32 for bias in biases)
    assert all(float(bias.abs().max()) <= 0.5 * 4096 for bias in biases if bias is not None)


def test_blocks_are_smaller_for_gradients_and_give_the_same() -> None:
    """Far pairs, whose weights are slow in the backward, are fewer: a block is at most a quarter of its keys."""
    query, key, value, slope = tensors(4, 2, 1200)
    seen = whole(2, 1200, 1200, causal=True)
    windows = row_bias.windows_of(query, key, 4 * slope, seen, 0.1)
    assert any(64 < keys < 1200 for _, _, keys in windows)
    queries: dict[bool, list[int]] = {}
    for wanted in (False, True):
        calls = row_bias.linear_calls(4 * slope, seen, windows, with_gradients=wanted)
        blocks = [(call.heads, (call.queries[1] - call.queries[0]) // call.chunks) for call in calls if call.causal]
        queries[wanted] = [max(size for heads, size in blocks if heads == run[:2]) for run in windows]
    assert queries[False] == [min(keys, 1024) for _, _, keys in windows]
    assert queries[True] == [min(512, max(64, keys // 4)) for _, _, keys in windows]
    for leaf in (query, key, value):  # a LoRA of one projection: the others have no gradient in the first layer
        found = attend_linear(*(x.detach().requires_grad_(x is leaf) for x in (query, key, value)), 4 * slope,
                              scaling=0.1, windowed=True)  # fmt: skip
        torch.testing.assert_close(found, dense(query, key, value, 4 * slope, 0.1), atol=EXACT, rtol=0)
