"""What compat knows of torch's wrappers, seen on real ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_posswap.compat import torch_wrappers


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_compiled_original() -> None:
    module = nn.Linear(2, 2)
    assert torch_wrappers.compiled_original(torch.compile(module, backend="eager")) is module
    assert torch_wrappers.compiled_original(module) is None
    assert torch_wrappers.compiled_original("no module") is None


def test_kind_of_wrapper() -> None:
    module = nn.Linear(2, 2)
    assert torch_wrappers.kind_of_wrapper(module) is None
    assert torch_wrappers.kind_of_wrapper(torch.compile(module, backend="eager")) == "torch.compile's wrapper"
    assert torch_wrappers.kind_of_wrapper(checkpoint_wrapper(module)) == "a wrapper for activation checkpointing"


def test_kind_of_wrapper_of_fsdp(process_group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
    assert torch_wrappers.kind_of_wrapper(wrapped) == "FSDP's wrapper"


def test_name_without_wrappers(process_group: None) -> None:
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    names = [name for name, _ in nn.Sequential(nn.Linear(2, 2)).named_parameters()]
    for wrapped in (inner, torch.compile(inner, backend="eager"), nn.parallel.DistributedDataParallel(inner)):
        assert [torch_wrappers.name_without_wrappers(name) for name, _ in wrapped.named_parameters()] == names
