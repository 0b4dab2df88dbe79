"""What autocast widens on a GPU, by torch's own tables, and that a CPU then does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.compat.torch_autocast import WIDENED, gpu_autocast


@pytest.mark.parametrize("name", WIDENED)
def test_what_is_widened_is_so_on_a_gpu_alone(name: str) -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"aten::{name}", "AutocastCUDA")
    assert not has(f"aten::{name}", "AutocastCPU")


def test_gpu_autocast() -> None:
    x = torch.linspace(0.1, 2.0, 6, dtype=torch.bfloat16).view(2, 3).requires_grad_()
    asked = (lambda: x.pow(3), lambda: functional.layer_norm(x, (3,)), lambda: x.softmax(-1), lambda: x.sum())
    with torch.autocast("cpu", torch.bfloat16):
        assert {ask().dtype for ask in asked} == {torch.bfloat16}
        with gpu_autocast():
            assert {ask().dtype for ask in asked} == {torch.float32}
            assert torch.softmax(x, -1, dtype=torch.float64).dtype == torch.float64
            torch.testing.assert_close(x.pow(3), x.float().pow(3))
            x.pow(3).sum().backward()
        assert {ask().dtype for ask in asked} == {torch.bfloat16}
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (3 * x.float() ** 2).bfloat16().detach(), rtol=2**-7, atol=0)
    with gpu_autocast():
        assert x.pow(3).dtype == torch.bfloat16  # without autocast nothing is widened


def test_gpu_autocast_is_of_its_thread_alone() -> None:
    x = torch.linspace(0.1, 2.0, 6, dtype=torch.bfloat16).view(2, 3)

    def results() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [x.pow(3), functional.layer_norm(x, (3,)), x.softmax(-1), x.sum(), functional.softplus(x)]

    expected = results()
    with gpu_autocast(), ThreadPoolExecutor(1) as threads:
        found = threads.submit(results).result()
        assert {each.dtype for each in results()} == {torch.float32}
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(found, expected, strict=True))
