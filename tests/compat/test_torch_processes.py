"""A group of processes that are not there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_posswap.compat import torch_processes


def test_fake_processes() -> None:
    for count in (3, 2):
        with torch_processes.fake_processes(count):
            assert (dist.get_rank(), dist.get_world_size()) == (0, count)
            dist.all_reduce(torch.ones(2))  # waits for nobody
        assert not dist.is_initialized()


def test_can_be_fake() -> None:
    parts, whole = [[torch.ones(2, device="meta")] * 2], [torch.ones(2, device="meta")]
    with torch_processes.fake_processes(2):
        group = dist.group.WORLD
        assert group is not None
        gather = torch.ops.c10d.allgather_
        if torch_processes.can_be_fake():
            gather(parts, whole, group.boxed(), False)
        else:
            with pytest.raises(NotImplementedError, match="c10d::allgather_"):
                gather(parts, whole, group.boxed(), False)


def test_is_collective() -> None:
    assert torch_processes.is_collective(torch.ops.c10d.allreduce_.default)
    assert torch_processes.is_collective(torch.ops._c10d_functional.all_reduce.default)
    assert not torch_processes.is_collective(torch.ops.aten.add.Tensor)
