"""What compat says of fake tensors, of the torch that is installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_posswap.compat import torch_fake


def made() -> tuple[torch.Tensor, nn.Linear]:
    with torch_fake.fake_mode():
        return torch.ones(3), nn.Linear(2, 3)


def test_fake_mode() -> None:
    mode = torch_fake.fake_mode()
    with mode:
        large = torch.ones(1 << 40)
    assert (large[:4] + torch.ones(4)).shape == (4,)  # a tensor with numbers meets it


def test_keep_in_place() -> None:
    _, layer = made()
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        layer.to("cpu")  # if this is no longer so, keep_in_place can go
    weight = layer.weight
    torch_fake.keep_in_place(layer)
    assert layer.to("cpu") is layer
    assert layer.half().weight is weight
    assert nn.Sequential(layer).to(torch.float64)[0].weight.dtype == torch.float32


def test_is_fake() -> None:
    fake, layer = made()
    assert torch_fake.is_fake(fake)
    assert torch_fake.is_fake(layer.weight)
    assert not torch_fake.is_fake(torch.ones(3, device="meta"))


def test_holds_values() -> None:
    fake, _ = made()
    assert torch_fake.holds_values(torch.ones(3))
    assert not torch_fake.holds_values(torch.ones(3, device="meta"))
    assert not torch_fake.holds_values(fake)


def test_needs_values() -> None:
    aten = torch.ops.aten
    assert torch_fake.needs_values(aten.nonzero.default)
    assert torch_fake.needs_values(aten.equal.default)
    assert not torch_fake.needs_values(aten.add.Tensor)


def test_cannot_be_fake() -> None:
    fake, _ = made()
    for ask in (fake.sum().item, fake.nonzero):
        with pytest.raises(torch_fake.cannot_be_fake()):
            ask()


def test_is_nested() -> None:
    assert not torch_fake.is_nested()
    with torch_fake.fake_mode():
        assert torch_fake.is_nested()


def test_is_plain() -> None:
    class Other(torch.Tensor):
        pass

    fake, layer = made()
    assert all(map(torch_fake.is_plain, (torch.ones(3), nn.Parameter(torch.ones(3)), fake, layer.weight)))
    assert not torch_fake.is_plain(torch.ones(3).as_subclass(Other))


def test_without_fake_mode() -> None:
    with torch_fake.fake_mode(), torch_fake.without_fake_mode():
        assert torch.arange(3).tolist() == [0, 1, 2]
    with torch_fake.without_fake_mode():
        assert torch.arange(3).tolist() == [0, 1, 2]


def test_make_fake_as() -> None:
    _, layer = made()
    model = nn.Sequential(layer, nn.BatchNorm1d(3))
    model[1].weight.requires_grad_(False)
    torch_fake.make_fake_as(model)
    assert not any(map(torch_fake.holds_values, (*model.parameters(), *model.buffers())))
    assert not model[1].weight.requires_grad
    assert model[1].bias.requires_grad
    real = nn.Linear(2, 3)
    torch_fake.make_fake_as(real)
    assert torch_fake.holds_values(real.weight)


def test_made_fake() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    made = torch_fake.made_fake(torch_fake.fake_mode(), model)
    assert made is model
    assert all(torch_fake.is_fake(tensor) and tensor.device.type == "cpu" for tensor in model.state_dict().values())
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(isinstance(weight, torch.nn.Parameter) and weight.requires_grad for weight in model.parameters())
