"""What torch keeps of a module under private names, and the exchange of a living object's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_posswap.compat.accelerate_hooks import rebind_wrapped_forward


class TensorHooks(nn.Module):
    """A module that may do more where its tensors are moved, and where they are written into a state dict."""

    def convert_tensors(self, convert: Callable[[], Any]) -> None:
        """Move the module's tensors to another device or dtype, which `convert` does.

        Touches `Module._apply` (torch 2.6 to 2.13), which all of `to`, `to_empty`, `half`, ... go through. Without it
        what stands for a table comes out of meta as raw memory.
        """
        convert()

    def write_state(self, state: Any, prefix: str) -> None:
        """Change what the module has just written into `state` under names that begin with `prefix`.

        Touches `Module._save_to_state_dict` (torch 2.6 to 2.13). Without it what stands for a table that was taken away
        could be saved as a table.
        """

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        inherited = super()._apply
        self.convert_tensors(lambda: inherited(fn, recurse))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.write_state(destination, prefix)


def pre_hooks(module: nn.Module) -> list[Any]:
    """Return the forward pre-hooks of `module`, in the order in which they run.

    Touches `Module._forward_pre_hooks` (torch 2.6 to 2.13): hooks are registered by a public method, and asked for by
    none. Without it `verify_swap` cannot tell whether the hooks of a swap are still there.
    """
    return list(module._forward_pre_hooks.values())


def computes(function: str) -> bool:
    """Return whether a module computes while its method called `function` runs.

    Touches `Module._call_impl` and `Module._wrapped_call_impl` (torch 2.6 to 2.13), which run hooks around the forward.
    Without it a swap in a hook is not told from one outside of any forward.
    """
    return function in ("forward", "_call_impl", "_wrapped_call_impl")


def state_metadata(state: Any) -> dict[str, Any]:
    """Return torch's metadata of a state dict by module path, the dict itself; {} where it has none.

    Touches `_metadata` of what `Module.state_dict` returns (torch 2.6 to 2.13). Without it a stock model would take a
    swapped one's state dict.
    """
    return getattr(state, "_metadata", {})


def give_class(module: nn.Module, cls: Any) -> None:
    """Make `module` an instance of `cls`, a subclass or the base of its class; accelerate's hooks run its new forward.

    Touches `module.__class__`, which Python lets one set where both classes lay their objects out alike (nn.Module does
    in torch 2.6 to 2.13). Without it an attention class with the AttentionInterface would need copies of its weights.
    """
    other_forward = cls.forward is not type(module).forward
    module.__class__ = cls
    if other_forward:  # where it is the same one, the hook may wrap a forward of the instance
        rebind_wrapped_forward(module)
