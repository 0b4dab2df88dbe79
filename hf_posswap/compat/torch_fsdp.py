"""The memory of FSDP2 on a process, without the shards of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


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


def _parameters(model: nn.Module) -> Iterator[Any]:
    """Give what FSDP2 keeps of each weight.

    Touches `FSDPModule._get_fsdp_state` and `_fsdp_param_groups`, the one `_fsdp_param_group` of older ones (torch 2.6
    to 2.15). Without it neither of the above could be found.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = hasattr(state, "_fsdp_param_groups")
            groups = state._fsdp_param_groups if several else filter(None, [state._fsdp_param_group])
            yield from (parameter for group in groups for parameter in group.fsdp_params)
