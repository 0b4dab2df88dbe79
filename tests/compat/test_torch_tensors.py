"""What compat asks torch about tensors, of the torch that is installed."""

from __future__ import annotations

from typing import Any

import torch

from hf_posswap.compat import torch_tensors


def test_version_of() -> None:
    tensor = torch.zeros(3)
    before = torch_tensors.version_of(tensor)
    assert torch_tensors.version_of(tensor) == before
    tensor.add_(1)
    assert torch_tensors.version_of(tensor) != before


def test_version_of_a_tensor_made_in_inference_mode() -> None:
    with torch.inference_mode():
        assert torch_tensors.version_of(torch.zeros(3)) is None


def test_transforms_active() -> None:
    seen: list[Any] = [torch_tensors.transforms_active()]

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_tensors.transforms_active())
        return 2 * x

    torch.func.grad(double)(torch.tensor(1.0))
    torch.func.vmap(double)(torch.ones(2))
    assert seen == [False, True, True]


def test_keep_address() -> None:
    ours, theirs = torch.zeros(3), torch.zeros(3)
    torch_tensors.keep_address(ours)
    assert vars(ours) != vars(theirs)
    torch._dynamo.mark_static_address(theirs)
    assert vars(ours) == vars(theirs)


def test_in_backward() -> None:
    seen: list[bool] = [torch_tensors.in_backward()]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch_tensors.in_backward()))
    (2 * x).sum().backward()
    assert [*seen, torch_tensors.in_backward()] == [False, True, False]
