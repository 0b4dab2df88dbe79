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
