"""Processes that are not there: a group in which this process is the first of several, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def fake_processes(count: int) -> Iterator[None]:
    """Let this process be the first of `count` in the block; collectives leave what they were to fill as it is.

    Touches `torch.testing._internal.distributed.fake_pg.FakeStore` (torch 2.6 to 2.13), whose import registers the
    backend "fake". Without it what several processes share could be seen on several machines alone.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def can_be_fake() -> bool:
    """Return whether tensors without numbers can be sent between such processes.

    Touches `torch._C._dispatch_has_kernel_for_dispatch_key`: torch 2.13 has kernels of its collectives for meta, 2.6
    has none. Without it a dry run of several processes would end in an error of torch's.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allgather_", "Meta"))


def is_collective(operator: Any) -> bool:
    """Return whether `operator` sends tensors between processes.

    Touches the namespaces `c10d` and `_c10d_functional` of `torch.ops` (torch 2.6 to 2.13). Without it what is sent
    could not be told from what is computed.
    """
    return operator.namespace in ("c10d", "_c10d_functional")
