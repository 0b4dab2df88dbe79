"""A group of processes that are not there."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_posswap.compat import torch_processes


def test_fake_processes() -> None:
    for count in (3, 2):
        with torch_processes.fake_processes(count):
            assert (dist.get_rank(), dist.get_world_size()) == (0, count)
            dist.all_reduce(torch.ones(2))  # waits for nobody
        assert not dist.is_initialized()


def test_is_collective() -> None:
    assert torch_processes.is_collective(torch.ops.c10d.allreduce_.default)
    assert torch_processes.is_collective(torch.ops._c10d_functional.all_reduce.default)
    assert not torch_processes.is_collective(torch.ops.aten.add.Tensor)
