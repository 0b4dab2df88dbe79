"""The surgery of each edit at the native rotary module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posswap.families.rope_config import config_at
from hf_posswap.patching.actions import RestoreChild, Undo
from hf_posswap.patching.rotary import KeepAngles, NeutralRotary, rebuilt


@dataclass(frozen=True)
class RebuildRotary:
    """Replaces a rotary module by a new one of its class, built from the config with the new rope parameters.

    Attributes:
        path: of the module.
        config: the part of the swapped model's config that says them.
        part: path of that part.
    """

    path: str
    config: Any
    part: str

    def apply(self, model: Any, undo: list[Undo]) -> None:
        old = model.get_submodule(self.path)
        undo.insert(0, RestoreChild(self.path, old))
        new: Any = rebuilt(old, self.config)
        new.config = config_at(model.config, self.part)
        device = next(old.buffers()).device
        new.register_forward_pre_hook(KeepAngles(new))
        model.set_submodule(self.path, new.to(device))


@dataclass(frozen=True)
class NeutraliseRotary:
    """Makes a rotary module rotate by nothing, so that raw keys reach the attention site.

    Attributes:
        path: of the module.
        config: the part of the config, as it was, that the module goes on reading.
        sets: of its frequencies that are neutral; see `families.rope_config`.
    """

    path: str
    config: Any
    sets: tuple[str, ...]

    def apply(self, model: Any, undo: list[Undo]) -> None:
        native = model.get_submodule(self.path)
        undo.insert(0, RestoreChild(self.path, native))
        native.config = self.config
        model.set_submodule(self.path, NeutralRotary(native, self.sets))
