"""What torch knows of tensors and the transforms around them by private names alone; and fake tensors.

Fake ones have a shape, a dtype and a device, and no numbers or memory. All of theirs are of
`torch._subclasses.fake_tensor` (torch 2.6 to 2.13), which torch's own tools and its compiler are built on, and which no
page of torch promises.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

if TYPE_CHECKING:
    from torch._ops import OpOverload


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


def assert_when_run(condition: Tensor, message: str) -> None:
    """Have a graph that is traced now raise a RuntimeError with `message` in a run where `condition`, [], is False.

    Touches `torch._assert_async` (torch 2.6 to 2.13). Without it compiled code goes on where an eager forward raises.
    """
    torch._assert_async(condition, message)


def in_backward() -> bool:
    """Return whether this thread is in a backward, as a layer is that runs again under gradient checkpointing.

    Touches `torch._C._current_graph_task_id` (torch 2.6 to 2.15), as `torch.utils.checkpoint` does. Without it such a
    layer cannot be distinguished from one that user code calls.
    """
    return torch._C._current_graph_task_id() != -1


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors are made fake; tensors with numbers may meet them.

    Touches `FakeTensorMode`. Without it a model larger than this machine could not be looked at.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def keep_in_place(model: nn.Module) -> None:
    """Have `model`, which is fake, stay on its device and in its dtype, whatever asks it to move.

    Touches `Module._apply`. Without it a Trainer could not take it: a fake weight is remembered by weak references,
    and `Module.to` refuses to exchange such a tensor even where nothing is to be moved.
    """
    vars(model)["_apply"] = lambda *_, **__: model


def is_fake(tensor: Tensor) -> bool:
    """Return whether `tensor` is fake.

    Touches `FakeTensor`. Without it tensors that hold numbers cannot be told from those that do not.
    """
    return isinstance(tensor, FakeTensor)


def holds_values(tensor: Tensor) -> bool:
    """Return whether the numbers of `tensor` can be read: it is neither on meta nor fake.

    Touches the same. Without it a swap would read the weights of a fake model, which torch refuses.
    """
    return not (tensor.is_meta or is_fake(tensor))


def needs_values(operator: OpOverload) -> bool:
    """Return whether the shape of what `operator` gives, or the number itself, follows from numbers of its arguments.

    Touches `torch.Tag` on `OpOverload.tags`. Without it torch refuses to say how large the result would be.
    """
    data_dependent = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in operator.tags for tag in data_dependent)


def cannot_be_fake() -> tuple[type[Exception], ...]:
    """Return the errors of operators that need numbers, and of those that have no fake form.

    Touches `DataDependentOutputException`, `DynamicOutputShapeException` and `UnsupportedOperatorException`. Without it
    a model that cannot be looked at so would be told from a defect by the text of an error alone.
    """
    return DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException


def is_nested() -> bool:
    """Return whether a fake mode is active: whose operators only say how something would come out, as DTensor asks.

    Touches `torch._guards.active_fake_mode`. Without it such operators
    would count as work.
    """
    return active_fake_mode() is not None


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` is not a subclass of torch's own: neither quantised nor sharded; it may be fake.

    Touches the same. Without it a fake model would be taken for a quantised one.
    """
    return type(tensor) in (nn.Parameter, Tensor) or is_fake(tensor)


def without_fake_mode() -> AbstractContextManager[object]:
    """Return a context in which new tensors hold numbers, whatever mode is active around it.

    Touches `unset_fake_temporarily`. Without it the numbers of a scheme, which no weight has a part in, would be fake.
    """
    return unset_fake_temporarily()


def make_fake_as(model: nn.Module) -> None:
    """Make all tensors of `model` fake where its weights are: what a swap adds as well.

    Touches `FakeTensor.fake_mode` and `FakeTensorMode.from_tensor`. Without it a swapped model would hold both kinds,
    and would not run where only fake ones do.
    """
    mode = next((weight.fake_mode for weight in model.parameters() if isinstance(weight, FakeTensor)), None)
    if mode is None:
        return
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if holds_values(weight):
                setattr(module, name, nn.Parameter(_fake(mode, weight.detach()), requires_grad=weight.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            if holds_values(buffer):
                setattr(module, name, _fake(mode, buffer))


def made_fake(mode: FakeTensorMode, model: nn.Module) -> nn.Module:
    """Return `model`, which lies on meta, with each of its tensors exchanged for a fake one of the CPU.

    Touches nothing but what `fake_mode` does. Without it a model would have to be built of fake tensors, and what fills
    its weights asks for numbers.
    """
    new: dict[Tensor, Tensor] = {}  # weights that are tied stay so
    with mode:
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if weight not in new:
                    new[weight] = nn.Parameter(torch.empty_like(weight, device="cpu"), weight.requires_grad)
                setattr(module, name, new[weight])
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer not in new:
                    new[buffer] = torch.empty_like(buffer, device="cpu")
                setattr(module, name, new[buffer])
    return model


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return mode.from_tensor(tensor, static_shapes=True)
