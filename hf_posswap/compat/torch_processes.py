"""Several processes: a group in which this one is the first and nothing is sent; the memory of FSDP2 on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


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


def is_collective(operator: OpOverload) -> bool:
    """Return whether `operator` sends tensors between processes.

    Touches the namespaces `c10d` and `_c10d_functional` of `torch.ops` (torch 2.6 to 2.13). Without it what is sent
    could not be told from what is computed.
    """
    return operator.namespace in ("c10d", "_c10d_functional")


def gathered_weights(model: nn.Module) -> list[Tensor]:
    """Return the buffers that hold gathered weights of `model`; they are empty after the weights are freed.

    Touches `FSDPParam.all_gather_outputs` (torch 2.6 to 2.15). Without it whole weights would count as activations.
    """
    return [buffer for parameter in _parameters(model) for buffer in parameter.all_gather_outputs]


def whole_gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of `model` that are summed whole, over the batches before the last of a step.

    Touches `FSDPParam.unsharded_accumulated_grad` and `_unsharded_param` (torch 2.6 to 2.15). Without it the largest
    part of what steps of several batches cost under FSDP2 would count as activations.
    """
    gradients: list[Tensor | None] = []
    for parameter in _parameters(model):
        gathered = getattr(parameter, "_unsharded_param", None)  # there is none before the first forward
        gradient, accumulated = None if gathered is None else gathered.grad, parameter.unsharded_accumulated_grad
        gradients += [gradient, None if accumulated is gradient else accumulated]  # torch 2.15 keeps one, by both names
    return [gradient for gradient in gradients if gradient is not None]


def _parameters(model: nn.Module) -> Iterator[FSDPParam]:
    """Give what FSDP2 keeps of each weight.

    Touches `FSDPModule._get_fsdp_state` and `_fsdp_param_groups`, the one `_fsdp_param_group` of older ones (torch 2.6
    to 2.15). Without it neither of the above could be found.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            several = hasattr(state, "_fsdp_param_groups")
            groups = state._fsdp_param_groups if several else filter(None, [state._fsdp_param_group])
            yield from (parameter for group in groups for parameter in group.fsdp_params)
