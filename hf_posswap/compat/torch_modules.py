"""What torch and its wrappers keep of a module under private names, and the exchange of a living object's class."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from hf_posswap.compat.accelerate_state import rebind_wrapped_forward
from hf_posswap.compat.python_objects import packages_of, rebound

_Module = TypeVar("_Module", bound=nn.Module)
IDENTIFIED = {"torch", "transformers", "hf_posswap", "accelerate", "peft", "contextlib"}
"""Packages whose code in a model is known by its classes, its weights and its config."""


class TensorHooks(nn.Module):
    """A module that may do more where its tensors are moved, and where they are written into a state dict."""

    def convert_tensors(self, convert: Callable[[], object]) -> None:
        """Move the module's tensors to another device or dtype, which `convert` does.

        Touches `Module._apply` (torch 2.6 to 2.13), which all of `to`, `to_empty`, `half`, ... go through. Without it
        what stands for a table comes out of meta as raw memory.
        """
        convert()

    def write_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Change what the module has just written into `state` under names that begin with `prefix`.

        Touches `Module._save_to_state_dict` (torch 2.6 to 2.13). Without it what stands for a table that was taken away
        could be saved as a table.
        """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        inherited = super()._apply
        self.convert_tensors(lambda: inherited(fn, recurse))
        return self

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.write_state(destination, prefix)


_register_parameter = nn.Module.register_parameter
_replacing: list[Callable[..., None]] = []
_keeping, _keeping_lock = threading.local(), threading.Lock()
_keeping_threads = 0


def _register_in_thread(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Register a parameter as it is given in threads inside `parameters_as_given`, in others as before."""
    others = [] if getattr(_keeping, "depth", 0) else list(_replacing)
    (others or [_register_parameter])[0](module, name, parameter)


@contextmanager
def parameters_as_given() -> Iterator[None]:
    """Let modules that this thread builds inside the block keep the parameters that they are given, on their device.

    Touches `Module.register_parameter`, which vLLM and accelerate's `init_empty_weights` replace for the whole process
    while they build a model, by a function that puts each parameter on meta. Without it a tiny model that is built
    meanwhile could not run, so no swap could be proved. Other threads keep the function that was there, and where its
    owner puts back torch's own meanwhile, that stays.
    """
    global _keeping_threads
    with _keeping_lock:
        replaced = nn.Module.register_parameter
        if replaced is not _register_parameter and replaced is not _register_in_thread:
            _replacing[:] = [replaced]
            nn.Module.register_parameter = _register_in_thread  # type: ignore[assignment, method-assign]
        _keeping_threads += 1
    _keeping.depth = getattr(_keeping, "depth", 0) + 1
    try:
        yield
    finally:
        _keeping.depth -= 1
        with _keeping_lock:
            _keeping_threads -= 1
            if not _keeping_threads and _replacing:
                if nn.Module.register_parameter is _register_in_thread:
                    nn.Module.register_parameter = _replacing[0]  # type: ignore[method-assign]
                _replacing.clear()  # whoever saved our function and puts it back then has torch's own


def pre_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """Return the forward pre-hooks of `module`, in the order in which they run.

    Touches `Module._forward_pre_hooks` (torch 2.6 to 2.13): hooks are registered by a public method, and asked for by
    none. Without it `verify_swap` cannot tell whether the hooks of a swap are still there.
    """
    return list(module._forward_pre_hooks.values())


def foreign_code(model: nn.Module) -> list[object]:
    """Return what was put into `model` or its classes at run time, unless it is code of the packages in `IDENTIFIED`.

    These are hooks on a module, and functions in a class of these packages. A hook of torch's pruning, of accelerate or
    of PEFT computes what weights and config say.

    Touches `Module._forward_hooks` and `Module._forward_pre_hooks` (torch 2.6 to 2.13), and the dict of a class.
    Without it the kept numbers of a model serve for the same weights with other code.
    """
    modules = list(model.modules())
    hooks = [hook for each in modules for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values())]
    classes = {cls for each in modules for cls in type(each).__mro__ if cls.__module__.partition(".")[0] in IDENTIFIED}
    functions = [each for cls in classes for each in vars(cls).values() if isinstance(each, FunctionType)]
    return [each for each in (*hooks, *functions) if packages_of(each) - IDENTIFIED]


def computes(function: str) -> bool:
    """Return whether a module computes while its method called `function` runs.

    Touches `Module._call_impl` and `Module._wrapped_call_impl` (torch 2.6 to 2.13), which run hooks around the forward.
    Without it a swap in a hook is not told from one outside of any forward.
    """
    return function in ("forward", "_call_impl", "_wrapped_call_impl")


def state_metadata(state: object) -> dict[str, dict[str, object]]:
    """Return torch's metadata of a state dict by module path, the dict itself; {} where it has none.

    Touches `_metadata` of what `Module.state_dict` returns (torch 2.6 to 2.13). Without it a stock model would take a
    swapped one's state dict.
    """
    return getattr(state, "_metadata", {})


def give_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make `module` an instance of `cls`, a subclass or the base of its class; accelerate's hooks run its new forward.

    Touches `module.__class__`, which Python lets one set where both classes lay their objects out alike (nn.Module does
    in torch 2.6 to 2.13). Without it an attention class with the AttentionInterface would need copies of its weights.
    """
    other_forward = cls.forward is not type(module).forward
    module.__class__ = cls
    if other_forward:  # where it is the same one, the hook may wrap a forward of the instance
        rebind_wrapped_forward(module)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Leave `model` after the block as it was before it, whatever the block raises.

    Restored are the attributes of each module (training mode, rotary state that follows the length of texts, buffers
    that a forward replaces or writes into, hooks) and requires_grad of each parameter. The values of parameters are not
    copied, so the block must not train them.

    Touches `vars(module)`, where torch keeps parameters, buffers, submodules and hooks in dicts (torch 2.6 to 2.13).
    Without it a forward leaves a dynamic or longrope rotary module with the angles of another length.
    """
    collections = (dict, list, set)  # which may be written into
    attributes = []
    for now in map(vars, model.modules()):
        attributes.append(
            (now, {name: (v, v.copy() if isinstance(v, collections) else None) for name, v in now.items()})
        )
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    values = [value for _, before in attributes for _, (value, _) in before.items() if isinstance(value, Tensor)]
    tensors = {id(each): each for each in (*model.buffers(), *values)}
    copies = [(each, each.detach().clone()) for each in tensors.values() if not each.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in copies:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for now, before in attributes:
            _restore(now, before)
        for parameter, requires_grad in trainable:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


def _restore(now: dict[str, object], before: dict[str, tuple[Any, Any]]) -> None:
    """Write the values of `before` into `now`, collections in place: others may refer to them."""
    for name in now.keys() - before.keys():
        del now[name]
    for name, (value, copied) in before.items():
        if name not in now or now[name] is not value:
            now[name] = value
        if isinstance(value, dict) and not _is_same(value.items(), copied.items()):
            value.clear()
            value.update(copied)
        elif isinstance(value, list) and not _is_same(enumerate(value), enumerate(copied)):
            value[:] = copied
        elif isinstance(value, set) and value != copied:
            value.clear()
            value.update(copied)


def _is_same(now: Iterable[tuple[object, object]], before: Iterable[tuple[object, object]]) -> bool:
    """Return whether both are the same objects under the same keys, in the same order."""
    return [(key, id(value)) for key, value in now] == [(key, id(value)) for key, value in before]


_INSIDE = {
    "_orig_mod": "torch.compile's wrapper",
    "_fsdp_wrapped_module": "FSDP's wrapper",
    "_checkpoint_wrapped_module": "a wrapper for activation checkpointing",
}


def copy_module(model: _Module, memo: dict[int, object] | None = None) -> _Module:
    """Return a deep copy of `model`, in which a forward that was put on an instance runs the copy.

    Touches the instance attributes `forward` and `_original_forward` (accelerate 1.12 to 1.15). Without it such a
    forward, which reaches the model by its closure, would run the original, which is not swapped.

    Args:
        model: a module.
        memo: as `copy.deepcopy` takes it: what the copy shares, by id.
    """
    memo = {} if memo is None else memo
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name in {"forward", "_original_forward"} & vars(module).keys():
            vars(module)[name] = rebound(vars(module)[name], memo)
    return copied


def compiled_original(model: nn.Module) -> nn.Module | None:
    """Return the model that `torch.compile` wrapped in `model`, or None.

    Touches `OptimizedModule._orig_mod` (torch 2.6 to 2.13). Without it a compiled model is taken for a plain one.
    """
    return _modules_of(model).get("_orig_mod")


def kind_of_wrapper(module: nn.Module) -> str | None:
    """Return what kind of wrapper `module` is, whose paths are other than those of the module in it; None: none.

    Touches `_orig_mod`, FSDP's `_fsdp_wrapped_module` and the `_checkpoint_wrapped_module` of
    `apply_activation_checkpointing` (torch 2.6 to 2.13). Without it a swap would pass by the parts in a wrapper.
    """
    return next((wrapper for name, wrapper in _INSIDE.items() if name in _modules_of(module)), None)


def name_without_wrappers(name: str) -> str:
    """Return the `name` of a parameter without what wrappers put into it.

    Touches the names of `kind_of_wrapper`, and DDP's "module.". Without it a wrapped parameter is not found again.

    Example:
        >>> name_without_wrappers("module._orig_mod.transformer.h.0._fsdp_wrapped_module.attn.c_attn.weight")
        'transformer.h.0.attn.c_attn.weight'
    """
    for inside in _INSIDE:
        name = name.replace(f"{inside}.", "")
    return name.removeprefix("module.")


def _modules_of(module: nn.Module) -> dict[str, nn.Module]:
    return vars(module).get("_modules", {}) if isinstance(module, nn.Module) else {}
