"""In the place of a native rotary module: an identity rotation, or a new module whose angles no cast blurs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.errors import PosswapError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class NeutralRotary(nn.Module):
    """A rotary module with the identity rotation: cos 1 and sin 0 in the shapes that the native one gives.

    Args:
        native: the model's own rotary module; `unpatch_model` puts it back.
        layer_types: whose rotation is the identity, where it has frequencies for each type; the others turn as ever.
    """

    def __init__(self, native: nn.Module, layer_types: tuple[str, ...]) -> None:
        super().__init__()
        self.native = native
        # not `layer_types`: some models read that of their rotary module, and mean the native one's
        self.posswap_types = layer_types
        self._last: tuple[Any, Any] = None, None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some models read their rotary module's own attributes
            return getattr(super().__getattr__("native"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `native` returns, without any rotation; for one token, as in decoding, what the last one got."""
        if torch.compiler.is_compiling():
            return self._without_rotation(*args, **kwargs)
        asked = _shapes(args, kwargs)
        known, out = self._last
        if asked is None or known != asked:
            out = self._without_rotation(*args, **kwargs)
            if asked is not None:
                self._last = asked, out
        return out

    def _without_rotation(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the native module gives where it rotates nothing.

        Raises:
            PosswapError: it gives something else than cos and sin, or complex numbers.
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
            f"{type(self.native).__name__} gives neither cos and sin nor complex numbers in this release of "
            f"transformers, but {_words(out)}: what would rotate nothing is unknown. "
            "Install a release that hf_posswap was tested with."
        )


def _words(out: Any) -> str:
    if isinstance(out, torch.Tensor):
        return f"one tensor {list(out.shape)} of {out.dtype}"
    return f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return all that cos 1 and sin 0 for one token follow from; None: there are more, or something else is given."""
    given = (*args, *kwargs.values())
    if len(given) != 2 or not all(type(one) is torch.Tensor for one in given):
        return None
    states, positions = given
    if positions.is_floating_point() or positions.shape[-1:] != (1,):
        return None
    return states.dtype, states.device, positions.shape, torch.is_inference_mode_enabled()


class KeepAngles:
    """Pre-hook of a rotary module: a cast of the model (`model.to(bfloat16)`) blurs its angles, this gives them back.

    A cast puts other tensors into the module, whatever dtype the model has in the end; so does a move, after which the
    angles are the same. What follows the length makes its frequencies anew, and leaves alone those that it began with.

    Args:
        module: the rotary module, as it was built.
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
    """Give a rotary module that carries `KeepAngles` its angles back, as its next forward would."""
    for hook in pre_hooks(module):
        if isinstance(hook, KeepAngles):
            hook(module, ())


def rebuilt(module: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """Return a new rotary module of the class of `module`, on the CPU, for `config`; `module` is not changed."""
    with torch.device("cpu"):
        return type(module)(config)
