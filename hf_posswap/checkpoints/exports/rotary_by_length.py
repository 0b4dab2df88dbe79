"""Rotary modules whose angles follow the length of the text, without state.

Stock transformers keeps the angles of "dynamic" in the module and recomputes them when the input values ask for it, as
"longrope" did until 5.23: a traced graph would keep the angles of the traced length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_posswap.compat.transformers_rotary import rope_function
from hf_posswap.families.rope_config import buffer_name, parameters_of
from hf_posswap.patching.sites.rotary.modules import rebuilt

FOLLOWS_LENGTH = ("dynamic", "longrope")
"""The rope types whose angles depend on the length of the text."""


class RotaryByLength(nn.Module):
    """A stock rotary module that recomputes its frequencies in each call, from the largest position.

    Args:
        native: the rotary module; it is not changed. Where it has frequencies for each layer type, only those that
            follow the length are recomputed.
    """

    rope_types: dict[str, str]
    originals: dict[str, int]

    def __init__(self, native: Any) -> None:
        super().__init__()
        self.rope_types, self.originals = following(native), {}
        fresh: Any = rebuilt(native, native.config)  # without hooks, which would restore its angles
        still = {
            name: "default" if name in self.rope_types else rope_type for name, rope_type in _rope_types(fresh).items()
        }
        fresh.rope_type = still if isinstance(fresh.rope_type, dict) else "default"
        self.native = fresh
        for rope_set, rope_type in self.rope_types.items():
            if rope_type == "longrope":
                self._keep_lists(rope_set)

    def _keep_lists(self, rope_set: str) -> None:
        """Keep both lists of frequencies of a set, and the length up to which the short one holds."""
        config = self.native.config
        self.originals[rope_set] = parameters_of(config, rope_set)["original_max_position_embeddings"]
        for name, length in (("short", 1), ("long", self.originals[rope_set] + 1)):
            values = _frequencies(config, "longrope", rope_set, length)
            self.register_buffer(f"{rope_set}_{name}", values, persistent=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some models read attributes of their rotary module
            return getattr(super().__getattr__("native"), name)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the native module's output with these frequencies.

        Args:
            x: a tensor of the output's dtype.
            position_ids: [B or 1, Q].
            args: for the native module.
            kwargs: for the native module.
        """
        length = position_ids.max() + 1
        buffers = {buffer_name(rope_set): self.frequencies(length, rope_set) for rope_set in self.rope_types}
        return functional_call(self.native, buffers, (x, position_ids, *args), kwargs)

    def frequencies(self, length: Tensor, rope_set: str = "") -> Tensor:
        """Return theta [R/2] for a text of `length` tokens, a tensor without dimensions."""
        if self.rope_types[rope_set] == "longrope":
            short, long = (getattr(self, f"{rope_set}_{name}") for name in ("short", "long"))
            return torch.where(length > self.originals[rope_set], long, short)
        return _frequencies(self.native.config, self.rope_types[rope_set], rope_set, length)


def following(module: Any) -> dict[str, str]:
    """Return the rope types of a rotary module that follow the length, by frequency set; {} for any other module."""
    return {name: rope_type for name, rope_type in _rope_types(module).items() if rope_type in FOLLOWS_LENGTH}


def _rope_types(module: Any) -> dict[str, str]:
    """Return the rope types of a rotary module by frequency set; "" is the name of an only one."""
    rope_type = vars(module).get("rope_type")  # not inherited: a wrapper passes on the attributes of what it wraps
    return dict(rope_type) if isinstance(rope_type, dict) else {} if rope_type is None else {"": rope_type}


def _frequencies(config: Any, rope_type: str, rope_set: str, length: Any) -> Tensor:
    """Return transformers' frequencies [R/2] of a set for texts of `length` tokens."""
    device = getattr(length, "device", "cpu")
    return rope_function(rope_type)(config, device, seq_len=length, layer_type=rope_set or None)[0]


def follow_length(model: nn.Module) -> None:
    """Replace each rotary module of `model` whose angles follow the length with a `RotaryByLength`."""
    for path, module in list(model.named_modules()):
        if not following(module) or isinstance(module, RotaryByLength):
            continue
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, RotaryByLength(module))
