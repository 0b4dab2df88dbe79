"""What compat asks torch about tensors, fake ones too, of the torch that is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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


def test_assert_when_run() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch_tensors.assert_when_run((x > 0).all(), "not above 0")
        return x + 1

    compiled = torch.compile(checked, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="not above 0"):
        compiled(torch.zeros(2))


def test_in_backward() -> None:
    seen: list[bool] = [torch_tensors.in_backward()]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch_tensors.in_backward()))
    (2 * x).sum().backward()
    assert [*seen, torch_tensors.in_backward()] == [False, True, False]


def made() -> tuple[torch.Tensor, nn.Linear]:
    with torch_tensors.fake_mode():
        return torch.ones(3), nn.Linear(2, 3)


def test_fake_mode() -> None:
    mode = torch_tensors.fake_mode()
    with mode:
        large = torch.ones(1 << 40)
    assert (large[:4] + torch.ones(4)).shape == (4,)  # a tensor with numbers meets it


def test_keep_in_place() -> None:
    _, layer = made()
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        layer.to("cpu")  # if this is no longer so, keep_in_place can go
    weight = layer.weight
    torch_tensors.keep_in_place(layer)
    assert layer.to("cpu") is layer
    assert layer.half().weight is weight
    assert nn.Sequential(layer).to(torch.float64)[0].weight.dtype == torch.float32


def test_is_fake() -> None:
    fake, layer = made()
    assert torch_tensors.is_fake(fake)
    assert torch_tensors.is_fake(layer.weight)
    assert not torch_tensors.is_fake(torch.ones(3, device="meta"))


def test_holds_values() -> None:
    fake, _ = made()
    assert torch_tensors.holds_values(torch.ones(3))
    assert not torch_tensors.holds_values(torch.ones(3, device="meta"))
    assert not torch_tensors.holds_values(fake)


def test_needs_values() -> None:
    aten = torch.ops.aten
    assert torch_tensors.needs_values(aten.nonzero.default)
    assert torch_tensors.needs_values(aten.equal.default)
    assert not torch_tensors.needs_values(aten.add.Tensor)


def test_cannot_be_fake() -> None:
    fake, _ = made()
    for ask in (fake.sum().item, fake.nonzero):
        with pytest.raises(torch_tensors.cannot_be_fake()):
            ask()


def test_is_nested() -> None:
    assert not torch_tensors.is_nested()
    with torch_tensors.fake_mode():
        assert torch_tensors.is_nested()


def test_is_plain() -> None:
    class Other(torch.Tensor):
        pass

    fake, layer = made()
    assert all(map(torch_tensors.is_plain, (torch.ones(3), nn.Parameter(torch.ones(3)), fake, layer.weight)))
    assert not torch_tensors.is_plain(torch.ones(3).as_subclass(Other))


def test_without_fake_mode() -> None:
    with torch_tensors.fake_mode(), torch_tensors.without_fake_mode():
        assert torch.arange(3).tolist() == [0, 1, 2]
    with torch_tensors.without_fake_mode():
        assert torch.arange(3).tolist() == [0, 1, 2]


def test_make_fake_as() -> None:
    _, layer = made()
    model = nn.Sequential(layer, nn.BatchNorm1d(3))
    model[1].weight.requires_grad_(False)
    torch_tensors.make_fake_as(model)
    assert not any(map(torch_tensors.holds_values, (*model.parameters(), *model.buffers())))
    assert not model[1].weight.requires_grad
    assert model[1].bias.requires_grad
    real = nn.Linear(2, 3)
    torch_tensors.make_fake_as(real)
    assert torch_tensors.holds_values(real.weight)


def test_made_fake() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    made = torch_tensors.made_fake(torch_tensors.fake_mode(), model)
    assert made is model
    assert all(torch_tensors.is_fake(tensor) and tensor.device.type == "cpu" for tensor in model.state_dict().values())
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(isinstance(weight, torch.nn.Parameter) and weight.requires_grad for weight in model.parameters())
