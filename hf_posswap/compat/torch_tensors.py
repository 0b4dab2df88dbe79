"""What torch knows of tensors and of the transforms around them, and tells by private names alone."""

from __future__ import annotations

import torch
from torch import Tensor


def version_of(tensor: Tensor) -> int | None:
    """Return how often `tensor` was written into; None for one made in inference mode, which keeps no count.

    Touches `Tensor._version`, which autograd goes by (torch 2.6 to 2.13). Without it a tensor that was written into
    in place cannot be told from one that was not.
    """
    return None if tensor.is_inference() else tensor._version


def keep_address(tensor: Tensor) -> None:
    """Tell torch.compile that `tensor` is written into where it lies, as the tensors of static caches are.

    Touches `torch._dynamo.mark_static_address` (torch 2.6 to 2.13), as transformers does. Without it CUDA graphs copy
    the tensor in each step, or are not made.
    """
    torch._dynamo.mark_static_address(tensor)


def transforms_active() -> bool:
    """Return whether a transform of `torch.func` (grad, vmap, ...) is at work.

    Touches `torch._C._are_functorch_transforms_active` (torch 2.6 to 2.13). Without it kernels that `torch.func` cannot
    look into would be taken under it.
    """
    return torch._C._are_functorch_transforms_active()


def in_backward() -> bool:
    """Return whether this thread is in a backward, as a layer is that runs again under gradient checkpointing.

    Touches `torch._C._current_graph_task_id` (torch 2.6 to 2.15), as `torch.utils.checkpoint` does. Without it such a
    layer cannot be distinguished from one that user code calls.
    """
    return torch._C._current_graph_task_id() != -1
