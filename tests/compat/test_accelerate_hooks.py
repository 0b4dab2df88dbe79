"""accelerate's hooks as compat finds them, on modules that accelerate offloaded."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from accelerate import hooks
from torch import nn

from hf_posswap.compat import accelerate_hooks
from hf_posswap.patching.verify.verify_swap import copy_sharing_weights
from tests.training.tiny_models import tiny


@pytest.fixture
def offloaded() -> Any:
    """Return a linear layer whose weights accelerate keeps on the CPU, and brings for a forward."""
    return accelerate.cpu_offload(nn.Sequential(nn.Linear(2, 2)), torch.device("cpu"), offload_buffers=True)[0]


def test_hook_of(offloaded: nn.Module) -> None:
    assert isinstance(accelerate_hooks.hook_of(offloaded), hooks.ModelHook)
    assert accelerate_hooks.hook_of(nn.Linear(2, 2)) is None


def test_set_hook(offloaded: nn.Module) -> None:
    class Counting(hooks.ModelHook):
        count = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return args, kwargs

    counting = Counting()
    before = accelerate_hooks.hook_of(offloaded)
    accelerate_hooks.set_hook(offloaded, counting)
    offloaded(torch.ones(1, 2, device="meta"))
    accelerate_hooks.set_hook(offloaded, before)
    offloaded(torch.ones(1, 2))
    assert counting.count == 1


def test_offloading_hooks(offloaded: Any) -> None:
    (hook,) = accelerate_hooks.offloading_hooks(offloaded)
    assert offloaded.weight.is_meta
    assert hook.weights_map["weight"].shape == (2, 2)
    assert hook.execution_device == torch.device("cpu")
    assert hook.tied_params_map is None or isinstance(hook.tied_params_map, dict)
    assert list(accelerate_hooks.offloading_hooks(nn.Linear(2, 2))) == []


def test_offloading_hooks_in_a_sequence(offloaded: Any) -> None:
    hooks.add_hook_to_module(offloaded, hooks.ModelHook(), append=True)
    assert isinstance(accelerate_hooks.hook_of(offloaded), hooks.SequentialHook)
    assert len(list(accelerate_hooks.offloading_hooks(offloaded))) == 1


@pytest.mark.parametrize("several", [False, True])
def test_without_offload(offloaded: Any, several: bool) -> None:
    if several:
        hooks.add_hook_to_module(offloaded, hooks.ModelHook(), append=True)
    expected = offloaded(torch.ones(1, 2))
    (hook,) = accelerate_hooks.offloading_hooks(offloaded)
    for name in ("weight", "bias"):
        setattr(offloaded, name, nn.Parameter(hook.weights_map[name].clone()))
    accelerate_hooks.set_hook(offloaded, accelerate_hooks.without_offload(accelerate_hooks.hook_of(offloaded)))
    assert list(accelerate_hooks.offloading_hooks(offloaded)) == []
    assert torch.equal(offloaded(torch.ones(1, 2)), expected)
    assert not offloaded.weight.is_meta  # it stays where it was put


def test_rebind_wrapped_forward(offloaded: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    expected = 2 * offloaded(torch.ones(1, 2))
    offloaded.__class__ = Doubled
    accelerate_hooks.rebind_wrapped_forward(offloaded)
    assert torch.equal(offloaded(torch.ones(1, 2)), expected)
    accelerate_hooks.rebind_wrapped_forward(nn.Linear(2, 2))  # without a hook there is nothing to do


def test_take_out_of_autocast() -> None:
    model, ids = tiny("llama"), torch.arange(8)[None]
    with torch.no_grad():
        before = model(ids).logits
        prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
        assert not torch.equal(prepared(ids).logits, before)
        assert torch.equal(copy_sharing_weights(model)(ids).logits, before)
        assert not torch.equal(prepared(ids).logits, before)
        accelerate_hooks.take_out_of_autocast(model)
        assert torch.equal(model(ids).logits, before)
