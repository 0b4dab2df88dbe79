"""What torch's wrappers call the module that they wrap."""

from __future__ import annotations

from typing import Any

from torch import nn

_INSIDE = {
    "_orig_mod": "torch.compile's wrapper",
    "_fsdp_wrapped_module": "FSDP's wrapper",
    "_checkpoint_wrapped_module": "a wrapper for activation checkpointing",
}


def compiled_original(model: Any) -> Any:
    """Return the model that `torch.compile` wrapped in `model`, or None.

    Touches `OptimizedModule._orig_mod` (torch 2.6 to 2.13). Without it a compiled model is taken for a plain one.
    """
    return _modules_of(model).get("_orig_mod")


def kind_of_wrapper(module: Any) -> str | None:
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


def _modules_of(module: Any) -> dict[str, Any]:
    return vars(module).get("_modules", {}) if isinstance(module, nn.Module) else {}
