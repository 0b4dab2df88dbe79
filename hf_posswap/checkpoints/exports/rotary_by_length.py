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
from hf_posswap.families.rope_config import buffer_name, parameters_of
from hf_posswap.patching.sites.rotary.modules import rebuilt

FOLLOWS_LENGTH = ("dynamic", "longrope")
"""The rope types whose angles depend on the length of the text."""


class RotaryByLength(nn.Module):
    """A stock rotary module, its frequencies computed anew in each call from the largest position in it.

    Args:
        native: the rotary module; it is not changed. Where it has a set of frequencies for each type of layers, those
            sets that follow the length are computed anew.
    """

    kinds: dict[str, str]
    originals: dict[str, int]

    def __init__(self, native: Any) -> None:
        super().__init__()
        self.kinds, self.originals = following(native), {}
        fresh: Any = rebuilt(native, native.config)  # without hooks that would give it its angles back
        still = {name: "default" if name in self.kinds else kind for name, kind in _kinds(fresh).items()}
        fresh.rope_type = still if isinstance(fresh.rope_type, dict) else "default"
        self.native = fresh
        for rope_set, kind in self.kinds.items():
            if kind == "longrope":
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
        length = position_ids.max() + 1
        held = {buffer_name(rope_set): self.frequencies(length, rope_set) for rope_set in self.kinds}
        return functional_call(self.native, held, (x, position_ids, *args), kwargs)

    def frequencies(self, length: Tensor, rope_set: str = "") -> Tensor:
        """Return theta [R/2] for a text of `length` tokens, a tensor without dimensions."""
        if self.kinds[rope_set] == "longrope":
            short, long = (getattr(self, f"{rope_set}_{name}") for name in ("short", "long"))
            return torch.where(length > self.originals[rope_set], long, short)
        return _frequencies(self.native.config, self.kinds[rope_set], rope_set, length)


def following(module: Any) -> dict[str, str]:
    """Return by set of frequencies the rope types of a rotary module that follow the length; {} of any other module."""
    return {name: kind for name, kind in _kinds(module).items() if kind in FOLLOWS_LENGTH}


def _kinds(module: Any) -> dict[str, str]:
    """Return the rope types of a rotary module by its sets of frequencies, "" being the only one."""
    found = vars(module).get("rope_type")  # its own: a module around it hands on its attributes
    return dict(found) if isinstance(found, dict) else {} if found is None else {"": found}


def _frequencies(config: Any, kind: str, rope_set: str, length: Any) -> Tensor:
    """Return transformers' frequencies [R/2] of a set for texts of `length` tokens."""
    device = getattr(length, "device", "cpu")
    return rope_function(kind)(config, device, seq_len=length, layer_type=rope_set or None)[0]


def follow_length(model: nn.Module) -> None:
    """Put a `RotaryByLength` in the place of each rotary module of `model` whose angles follow the length."""
    for path, module in list(model.named_modules()):
        if not following(module) or isinstance(module, RotaryByLength):
            continue
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, RotaryByLength(module))
