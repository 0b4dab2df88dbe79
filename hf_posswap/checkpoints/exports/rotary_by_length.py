"""Rotary modules whose angles follow the length of the text, as functions of their input alone.

Stock transformers keeps the angles of "dynamic" in the module and asks the numbers that come in whether to make new
ones, and so did "longrope" until 5.23: a graph of that holds the angles of the length that it was traced with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_posswap.compat.transformers_rotary import rope_function
from hf_posswap.patching.sites.rotary.modules import rebuilt

FOLLOWS_LENGTH = ("dynamic", "longrope")
"""The rope types whose angles depend on the length of the text."""


class RotaryByLength(nn.Module):
    """A stock rotary module, its frequencies computed anew in each call from the largest position in it.

    Args:
        native: the rotary module, of one set of frequencies for all layers; it is not changed.
    """

    kind: str
    original: int

    def __init__(self, native: Any) -> None:
        super().__init__()
        self.kind = native.rope_type
        fresh: Any = rebuilt(native, native.config)  # without hooks that would give it its angles back
        fresh.rope_type = "default"
        self.native = fresh
        if self.kind == "longrope":
            self.original = native.config.rope_parameters["original_max_position_embeddings"]
            make = rope_function(self.kind)
            lists = (make(native.config, "cpu", seq_len=length)[0] for length in (1, self.original + 1))
            for name, values in zip(("short", "long"), lists, strict=True):
                self.register_buffer(name, values, persistent=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some models read their rotary module's own attributes
            return getattr(super().__getattr__("native"), name)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the native module does with these frequencies.

        Args:
            x: of the dtype that is wanted.
            position_ids: [B or 1, Q].
            args: for the native module.
            kwargs: for the native module.
        """
        held = {"inv_freq": self.frequencies(position_ids.max() + 1)}
        return functional_call(self.native, held, (x, position_ids, *args), kwargs)

    def frequencies(self, length: Tensor) -> Tensor:
        """Return theta [R/2] for a text of `length` tokens, a tensor without dimensions."""
        if self.kind == "longrope":
            return torch.where(length > self.original, self.long, self.short)
        return rope_function(self.kind)(self.native.config, length.device, seq_len=length)[0]


def follow_length(model: nn.Module) -> None:
    """Put a `RotaryByLength` in the place of each rotary module of `model` whose angles follow the length."""
    for path, module in list(model.named_modules()):
        if getattr(module, "rope_type", None) not in FOLLOWS_LENGTH or isinstance(module, RotaryByLength):
            continue
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, RotaryByLength(module))
