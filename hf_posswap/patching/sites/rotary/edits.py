"""The edits of a native rotary module: rebuilt from other rope parameters, or replaced by the identity rotation."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from hf_posswap.families.rope_config import config_at
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.continuous_batching import (
    ONE_LENGTH,
    refuse_continuous_batching,
)
from hf_posswap.patching.edits.edit import PluginOnly, Saved, TouchesNothing
from hf_posswap.patching.edits.restore import replace_child, restore_child
from hf_posswap.patching.record.refusals import POSSWAP_ROPE_TYPE
from hf_posswap.patching.sites.rotary.modules import (
    KeepAngles,
    NeutralRotary,
    matches,
    rebuilt,
    turns_nothing,
    with_real_dtype,
)
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.rope import RotaryScheme

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class RebuildRotary(TouchesNothing):
    """Replaces a rotary module by a new one of its class, built from the config with the new rope parameters.

    Attributes:
        part: path of the sub-config that it is built from.
        values: the new values in that sub-config, by name.
        scheme: resolved.
        geometry: of the stack.
        layer_types: layer types whose rotation the scheme replaces; see `families.rope_config`.
    """

    part: str
    values: dict[str, Any]
    scheme: Scheme
    geometry: Geometry
    layer_types: tuple[str, ...]

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        old = model.get_submodule(self.path)
        new = rebuilt(old, self._config(model))
        new.config = config_at(model.config, self.part)
        new.register_forward_pre_hook(KeepAngles(new))
        replace_child(model, self.path, new.to(next(old.buffers()).device), saved)
        self._refuse_batches(model)

    def _refuse_batches(self, model: nn.Module) -> None:
        """Make `model` refuse continuous batching if its angles follow the length."""
        if isinstance(self.scheme, RotaryScheme) and self.scheme.length_dependent:
            refuse_continuous_batching(model, ONE_LENGTH)

    def _config(self, model: nn.Module) -> PreTrainedConfig:
        """Return the sub-config that the new module is built from."""
        trial = copy.deepcopy(model.config)
        subconfig = config_at(trial, self.part)
        for name, value in self.values.items():
            setattr(subconfig, name, copy.deepcopy(value))
        return config_at(with_real_dtype(trial, subconfig), self.part)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        restore_child(model, self.path, saved)
        refuse_continuous_batching(model, None)

    def check(self, model: PreTrainedModel) -> str | None:
        module = model.get_submodule(self.path)
        if isinstance(self.scheme, RotaryScheme):
            good = all(matches(module, self.scheme, self.geometry, name) for name in self.layer_types)
        else:
            good = turns_nothing(module)
        return None if good else "the rotary module does not have the planned frequencies"

    def reload(self, model: PreTrainedModel) -> None:
        """Protect the angles from casts; transformers has built the module from the new config."""
        rotary = model.get_submodule(self.path)
        rotary.register_forward_pre_hook(KeepAngles(rotary))
        self._refuse_batches(model)

    def with_scheme(self, scheme: Scheme) -> Self:
        return replace(self, scheme=scheme)


@dataclass(frozen=True, kw_only=True)
class NeutraliseRotary(PluginOnly, TouchesNothing):
    """Makes a rotary module return the identity rotation, so that raw keys reach the attention site.

    Attributes:
        part: path of the sub-config that the module keeps reading, unchanged.
        layer_types: layer types whose rotation becomes the identity; see `families.rope_config`.
    """

    part: str
    layer_types: tuple[str, ...]

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        native = model.get_submodule(self.path)
        saved["config"] = native.config
        replace_child(model, self.path, NeutralRotary(native, self.layer_types), saved)
        native.config = copy.deepcopy(config_at(model.config, self.part))  # a copy, because the config is edited later

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        restore_child(model, self.path, saved)
        if "config" in saved:
            model.get_submodule(self.path).config = saved["config"]

    def check(self, model: PreTrainedModel) -> str | None:
        neutral = isinstance(model.get_submodule(self.path), NeutralRotary)
        return None if neutral else "the native rotation is still active"


@dataclass(frozen=True, kw_only=True)
class KeepRotary(PluginOnly, TouchesNothing):
    """Keeps a rotary module at work while the model's config is marked for stock transformers to refuse.

    Attributes:
        part: path of the sub-config that the module reads: it gets a copy, from before the mark.
        follows_length: whether its angles follow the length of the input.
    """

    part: str
    follows_length: bool

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        rotary = model.get_submodule(self.path)
        saved["config"] = rotary.config
        rotary.config = copy.deepcopy(config_at(model.config, self.part))
        if self.follows_length:
            refuse_continuous_batching(model, ONE_LENGTH)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        if "config" in saved:
            model.get_submodule(self.path).config = saved["config"]
        refuse_continuous_batching(model, None)

    def check(self, model: PreTrainedModel) -> str | None:
        rotary = model.get_submodule(self.path)
        if isinstance(rotary, NeutralRotary):
            return "the native rotation is gone"
        marked = POSSWAP_ROPE_TYPE in str(getattr(rotary.config, "rope_parameters", None))
        return "the rotary module reads the config that is marked for stock transformers to refuse" if marked else None
