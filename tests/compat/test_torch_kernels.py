"""The operators that compat names, of the torch that is installed, against the public function above them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_posswap.compat import torch_kernels

HERE = [
    pytest.param("cpu", torch.float32, 1e-5, id="cpu"),
    pytest.param("cuda", torch.bfloat16, 5e-2, id="cuda", marks=pytest.mark.gpu),
]


def inputs(device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, 2, 16, 8, dtype=dtype, device=device).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(("device", "dtype", "near"), HERE)
def test_fused_attention(device: str, dtype: torch.dtype, near: float) -> None:
    query, key, value = inputs(device, dtype)
    out, sums, *_ = torch_kernels.fused_attention(device)(query, key, value, 0.0, True)
    scores = (query @ key.transpose(-1, -2)).float() / 8**0.5
    hidden = torch.ones(16, 16, dtype=torch.bool, device=device).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(out, scaled_dot_product_attention(query, key, value, is_causal=True), atol=near, rtol=0)
    torch.testing.assert_close(sums[..., :16], expected, atol=near, rtol=near)


@pytest.mark.parametrize(("device", "dtype", "near"), HERE)
def test_fused_attention_backward(device: str, dtype: torch.dtype, near: float) -> None:
    given = inputs(device, dtype)
    out, sums, *rest = torch_kernels.fused_attention(device)(*given, 0.0, True)
    grad = torch.ones_like(out)
    more = (None, None, 16, 16) if device == "cuda" else ()
    unread = (torch.zeros(2, dtype=torch.int64, device=device),) * 2 if device == "cuda" else ()
    found = torch_kernels.fused_attention_backward(device)(grad, *given, out, sums, *more, 0.0, True, *unread)
    expected = torch.autograd.grad(scaled_dot_product_attention(*given, is_causal=True).sum(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=near, rtol=near)


@pytest.mark.parametrize(("device", "dtype", "near"), HERE)
def test_fused_takes_groups(device: str, dtype: torch.dtype, near: float) -> None:
    """Where it says yes, the public function agrees: told to use these operators alone, it takes groups."""
    query, (key, value) = inputs(device, dtype)[0], (x[:, :1] for x in inputs(device, dtype)[1:])
    if not torch_kernels.fused_takes_groups(device):
        pytest.skip("this torch is not known to take groups")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out, *_ = torch_kernels.fused_attention(device)(query, key, value, 0.0, True)
    torch.testing.assert_close(out, expected, atol=near, rtol=0)


def test_efficient_attention() -> None:
    names = [argument.name for argument in torch_kernels.efficient_attention().default._schema.arguments]
    assert names == ["query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"]
    query, key, value = (one.detach().to("meta") for one in inputs("cpu", torch.float32))
    assert torch_kernels.efficient_attention()(query, key, value, None, True, 0.1, True)[0].shape == query.shape


def test_with_autograd() -> None:
    """In the kernel of an operator autograd records nothing, but in the block."""

    def kernel(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            assert leaf.square().grad_fn is None
        with torch_kernels.with_autograd():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(leaf.square().sum(), leaf)[0]

    operator = torch.library.custom_op("tests_posswap::twice", kernel, mutates_args=(), schema="(Tensor x) -> Tensor")
    x = torch.arange(3.0, requires_grad=True)
    assert torch.equal(operator(x), 2 * torch.arange(3.0))
