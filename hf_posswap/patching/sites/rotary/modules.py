"""Replacements of a native rotary module: an identity rotation, or a new module whose angles survive casts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.errors import PosswapError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class NeutralRotary(nn.Module):
    """A rotary module with the identity rotation: cos 1 and sin 0 in the shapes of the native one.

    Args:
        native: the model's own rotary module; `unpatch_model` restores it.
        layer_types: layer types whose rotation is the identity; others, if it has several sets, rotate as before.
    """

    def __init__(self, native: nn.Module, layer_types: tuple[str, ...]) -> None:
        super().__init__()
        self.native = native
        # not `layer_types`: some models read that attribute of their rotary module and need the native one
        self.posswap_types = layer_types
        self._last: tuple[Any, Any] = None, None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some models read their rotary module's own attributes
            return getattr(super().__getattr__("native"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of `native` without rotation; for one token, as in decoding, the last output is cached."""
        if torch.compiler.is_compiling():
            return self._without_rotation(*args, **kwargs)
        key = _shapes(args, kwargs)
        cached, out = self._last
        if key is None or cached != key:
            out = self._without_rotation(*args, **kwargs)
            if key is not None:
                self._last = key, out
        return out

    def _without_rotation(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the native module with the identity rotation.

        Raises:
            PosswapError: the output is neither cos and sin nor complex numbers.
        """
        out = self.native(*args, **kwargs)
        layer_type = args[2] if len(args) > 2 else kwargs.get("layer_type")
        if isinstance(layer_type, str) and layer_type not in self.posswap_types:
            return out
        if isinstance(out, tuple) and len(out) == 2:
            cos, sin = out
            return torch.ones_like(cos), torch.zeros_like(sin)
        if isinstance(out, torch.Tensor) and out.is_complex():
            return torch.ones_like(out)
        raise PosswapError(
            f"{type(self.native).__name__} returns neither cos and sin nor complex numbers in this release of "
            f"transformers, but {_describe(out)}: the identity rotation is unknown. "
            "Install a release that hf_posswap was tested with."
        )


def _describe(out: Any) -> str:
    if isinstance(out, torch.Tensor):
        return f"one tensor {list(out.shape)} of {out.dtype}"
    return f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a cache key for cos 1 and sin 0 of one token; None for more tokens or other arguments."""
    given = (*args, *kwargs.values())
    if len(given) != 2 or not all(type(argument) is torch.Tensor for argument in given):
        return None
    states, positions = given
    if positions.is_floating_point() or positions.shape[-1:] != (1,):
        return None
    return states.dtype, states.device, positions.shape, torch.is_inference_mode_enabled()


class KeepAngles:
    """Pre-hook of a rotary module that restores its angles after a cast of the model (`model.to(bfloat16)`).

    A cast replaces the tensors of the module, as does a move, which keeps the angles. A length-dependent module
    recomputes its frequencies but never replaces its original ones.

    Args:
        module: the newly built rotary module.
    """

    def __init__(self, module: nn.Module) -> None:
        buffers = dict(module.named_buffers(recurse=False))
        self.exact = {name: buffer.clone() for name, buffer in buffers.items()}
        lasting = {name: buffer for name, buffer in buffers.items() if "original" in name}
        self.seen = lasting or buffers

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:
        if all(getattr(module, name) is buffer for name, buffer in self.seen.items()):
            return
        for name, exact in self.exact.items():
            setattr(module, name, exact.to(getattr(module, name).device, copy=True))
        self.seen = {name: getattr(module, name) for name in self.seen}
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:  # one for each set
            setattr(module, name, getattr(module, "original_max_seq_len", 0))  # angles of that length


def restore_angles(module: nn.Module) -> None:
    """Restore the angles of a rotary module with `KeepAngles`, as its next forward would."""
    for hook in pre_hooks(module):
        if isinstance(hook, KeepAngles):
            hook(module, ())


def rebuilt(module: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """Return a new rotary module of the class of `module`, on the CPU, for `config`; `module` is not changed."""
    with torch.device("cpu"):
        return type(module)(config)
