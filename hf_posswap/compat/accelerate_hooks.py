"""The hooks that accelerate hangs on modules to keep weights elsewhere: private attributes of the modules.

All are of `accelerate.hooks.add_hook_to_module`, alike in accelerate 1.12 to 1.15.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn


def hook_of(module: nn.Module) -> Any:
    """Return accelerate's hook of `module`, or None.

    Touches `module._hf_hook`. Without it offloaded weights are taken for weights on meta.
    """
    return vars(module).get("_hf_hook")


def set_hook(module: Any, hook: Any) -> None:
    """Replace accelerate's hook on `module`; the module's forward calls the new one.

    Touches `module._hf_hook`. Without it a table that was brought into memory would be taken away by the next forward.
    """
    module._hf_hook = hook


def offloading_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks of `module` that keep its own tensors elsewhere.

    Touches `hooks` of a `SequentialHook`, `offload` and `weights_map` of an `AlignDevicesHook`. Without it weights that
    lie elsewhere are not found.
    """
    hook = hook_of(module)
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "offload", False) and each.weights_map is not None:
            yield each


def without_offload(hook: Any) -> Any:
    """Return a hook that moves inputs as `hook` does, and no weights.

    Touches the same as `offloading_hooks`. Without it a table that was brought into memory would not stay there.
    """
    resting = copy.copy(hook)
    if hasattr(hook, "hooks"):
        resting.hooks = tuple(map(without_offload, hook.hooks))
    else:
        resting.offload = False
    return resting


def rebind_wrapped_forward(module: Any) -> None:
    """Have the hook of a `module` whose class was exchanged run the forward of the new class.

    Touches `module._old_forward`, the bound method that the hook wraps. Without it a module with a hook computes what
    its old class computes.
    """
    if "_old_forward" in vars(module):
        module._old_forward = type(module).forward.__get__(module)


def take_out_of_autocast(module: Any) -> None:
    """Give `module` the forward that it had before `Accelerator.prepare` put one with autocast in its place, if it did.

    Touches `_original_forward` of a prepared model (accelerate 1.12 to 1.15). Without it a model that a Trainer trains
    in mixed precision would be probed in that precision, whose noise hides and fakes effects of positions.
    """
    if (original := vars(module).pop("_original_forward", None)) is not None:
        vars(module)["forward"] = original
