"""The fused call of this torch against autograd through `scaled_dot_product_attention` in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_posswap.kernels import fused


@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_heads(groups: int, takes_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an older torch takes no groups, keys and values are repeated, and their gradients summed."""
    if takes_groups and not fused.fused_takes_groups("cpu"):
        pytest.skip("this torch takes no groups")
    monkeypatch.setattr(fused, "fused_takes_groups", lambda device: takes_groups)
    query, grad = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    key, value = torch.randn(2, groups, 7, 8), torch.randn(2, groups, 7, 8)
    out, sums = fused.forward(query, key, value, scaling=0.3, causal=True)
    found = out, *fused.backward(grad, query, key, value, out, sums, scaling=0.3, causal=True)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    expected = scaled_dot_product_attention(*exact, is_causal=True, scale=0.3, enable_gqa=True)
    wanted = expected, *torch.autograd.grad(expected, exact, grad.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.detach().float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 96], ids=["row", "dense"])
def test_weights_that_are_almost_nothing_keep_all_digits(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made larger for a CPU that is slow with them, they give the bits of before, and the gradients of float64."""
    length, slopes = 96, torch.tensor([4.0, 1.0, 0.25, 0.0])
    at = torch.arange(length).float()
    away = (at - at[-rows:, None]).reshape(1, 1, rows, length)
    bias = (slopes[None, :, None, None] * away).masked_fill(away > 0, -torch.inf)
    assert fused._has_tiny_weights(bias, dtype)
    assert not fused._has_tiny_weights(bias[:, 3:], dtype)
    query, grad, key, value = torch.randn(4, 2, 4, length, 8).to(dtype)
    settings = {"scaling": 0.3, "causal": rows == 1, "bias": bias}
    out, sums = fused.forward(query, key, value, **settings)
    found = fused.backward(grad, query, key, value, out, sums, **settings)
    monkeypatch.setattr(fused, "_has_tiny_weights", lambda bias, dtype: False)
    assert torch.equal(out, fused.forward(query, key, value, **settings)[0])
    before = fused.backward(grad, query, key, value, out, sums, **settings)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    future = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
    mask = bias.double() + (future if rows == 1 else 0.0)
    expected = scaled_dot_product_attention(*exact, attn_mask=mask, scale=0.3)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for one, old, other in zip(found, before, wanted, strict=True):
        error, allowed = ((x.double() - other).abs().max() for x in (one, old))
        assert error <= 2 * allowed + (4e-6 * other.abs().max() if dtype == torch.float32 else 0.0)


@pytest.mark.parametrize("times", [2.0**-60, 2.0**60])
def test_gradients_of_any_size_are_in_proportion(times: float) -> None:
    bias = -torch.arange(95.0, -1.0, -1.0)[None, None, None]
    query, grad, key, value = torch.randn(4, 1, 1, 96, 8)
    out, sums = fused.forward(query, key, value, scaling=0.3, causal=True, bias=bias)
    settings = {"scaling": 0.3, "causal": True, "bias": bias}
    found = fused.backward(grad * times, query, key, value, out, sums, **settings)
    for one, other in zip(found, fused.backward(grad, query, key, value, out, sums, **settings), strict=True):
        assert torch.equal(one / times, other)
        assert other.isfinite().all()


@pytest.mark.parametrize("rows", [1, 40])
def test_what_a_backward_leaves_out_has_almost_no_weight(rows: int) -> None:
    """In none of the rows and queries that a number of the bias stands for."""
    query, grad = torch.randn(2, 3, 4, 40, 8)
    key, value = torch.randn(2, 3, 2, 300, 8)
    places = torch.arange(300.0)
    bias = torch.tensor([0.25, 0.5, 1.0, 8.0])[None, :, None, None] * (places - places[-rows:, None])
    scores = 0.3 * query.double() @ key.double().repeat_interleave(2, dim=1).mT + bias.double()
    scores = scores.masked_fill(places > places[-40:, None], -torch.inf)
    sums = scores.logsumexp(-1)
    found, _, _, factor = fused._without_tiny(bias, grad, query, key, sums.float(), 0.3)
    is_left_out = found == fused.LOWEST
    assert torch.equal(found[~is_left_out], bias[~is_left_out])
    assert is_left_out.expand_as(scores)[scores - sums[..., None] > -40 + 1e-4].sum() == 0
    assert is_left_out.float().mean() > 0.3
    assert 2.0**-11 < float(grad.abs().amax() * factor) <= 2.0**-9
