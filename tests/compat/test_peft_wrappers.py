"""What compat knows of PEFT's wrappers, seen on a real PEFT model."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_posswap.compat import peft_wrappers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.table, self.rest = nn.Linear(2, 2), nn.Embedding(3, 2), nn.Linear(2, 2)


@pytest.fixture
def wrapped() -> Any:
    return get_peft_model(Net(), LoraConfig(target_modules=["project"], modules_to_save=["table"]))  # type: ignore[arg-type]


@pytest.fixture
def net(wrapped: Any) -> Any:
    return wrapped.get_base_model()


def test_is_adapted(net: Any) -> None:
    assert [peft_wrappers.is_adapted(one) for one in (net.project, net.table, net.rest)] == [True, True, False]


def test_is_saved_with_adapter(net: Any) -> None:
    assert [peft_wrappers.is_saved_with_adapter(one) for one in (net.table, net.rest)] == [True, False]


def test_original_of(net: Any) -> None:
    assert type(peft_wrappers.original_of(net.table)) is nn.Embedding
    assert peft_wrappers.original_of(net.rest) is net.rest


def test_base_layer_of(net: Any) -> None:
    assert type(peft_wrappers.base_layer_of(net.project)) is nn.Linear
    assert peft_wrappers.base_layer_of(net.rest) is net.rest


def test_trained_copies_of(net: Any) -> None:
    (copy,) = peft_wrappers.trained_copies_of(net.table)
    assert type(copy) is nn.Embedding
    assert copy.weight.requires_grad
    assert copy is not peft_wrappers.original_of(net.table)
    assert peft_wrappers.trained_copies_of(net.rest) == []


def test_is_copy(net: Any) -> None:
    copies = [path for path, _ in net.named_parameters() if peft_wrappers.is_copy(path)]
    assert copies == ["table.original_module.weight", "table.modules_to_save.default.weight"]


def test_name_without_adapter(wrapped: Any) -> None:
    names = {peft_wrappers.name_without_adapter(name) for name, _ in wrapped.named_parameters()}
    assert {name for name in names if "lora" not in name} == {name for name, _ in Net().named_parameters()}
