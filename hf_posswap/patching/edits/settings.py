"""Edits of what follows a config: its values, attributes of modules, and buffers whose shape follows the length."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.families.modules import get, owner_of
from hf_posswap.families.rope_config import config_at
from hf_posswap.patching.edits.edit import BuiltByConfig, Edit, Saved, Site, TouchesNothing
from hf_posswap.patching.edits.restore import replace_attribute, replace_buffer, restore_attributes, restore_buffers
from hf_posswap.utils.format import brief

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class SetAttribute(BuiltByConfig, TouchesNothing):
    """Sets a plain attribute of a module to its value in a fresh model of the new config.

    Attributes:
        module: path of the module.
        name: of the attribute.
        value: its new value.
    """

    module: str
    name: str
    value: object

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        replace_attribute(model, self.module, self.name, self.value, saved)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        restore_attributes(model, self.module, saved)

    def check(self, model: PreTrainedModel) -> str | None:
        actual = getattr(model.get_submodule(self.module), self.name, self.value)  # BigBird replaces modules itself
        return None if actual == self.value else f"it is {actual!r} instead of {self.value!r}"


@dataclass(frozen=True, kw_only=True)
class EditConfig(BuiltByConfig, TouchesNothing):
    """Sets the value at `path` in the model's config, which is a copy for the swapped model and needs no undo.

    Attributes:
        value: its new value.
    """

    value: object

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        parent, _, leaf = self.path.rpartition(".")
        setattr(config_at(model.config, parent), leaf, self.value)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Nothing: the model gets its original config back."""

    def check(self, model: PreTrainedModel) -> str | None:
        actual = config_at(model.config, self.path)
        return None if actual == self.value else f"the config has {actual!r} instead of {self.value!r}"


Scalar = bool | int | float | str | None


def changed_settings(
    model: nn.Module, fresh: nn.Module, left_out: tuple[str, ...]
) -> list[tuple[str, str, Scalar, Scalar]]:
    """Return the plain attributes in which a `fresh` model of the new config differs: path, name, old, new.

    Some families read the rope parameters outside their rotary modules too (the attention scale of multi-head latent
    attention, say); a swap must change those as well.

    Args:
        model: the current model.
        fresh: a new model of the new config.
        left_out: paths of modules that are replaced as a whole.
    """
    changes = []
    for path, new in fresh.named_modules():
        module = get(model, path)
        if path in left_out or module is None:
            continue
        for name, value in _scalars(new).items():
            old = _scalars(module).get(name)
            if old != value and hasattr(module, name):
                changes.append((path, name, old, value))
    return changes


def settings_to_follow(
    model: nn.Module, before: nn.Module, after: nn.Module, left_out: tuple[str, ...]
) -> list[tuple[str, str, Scalar, Scalar]]:
    """Return, in the form of `changed_settings`, the plain attributes of `model` that follow a change of its config.

    Attributes that the user set independently of the config (a dropout of 0, a scaling, an epsilon) are kept.

    Args:
        model: the current model.
        before: a fresh model of its current config.
        after: a fresh model of the new config.
        left_out: paths of modules that are replaced as a whole.
    """
    changes = []
    for path, name, _, value in changed_settings(before, after, left_out):
        module = get(model, path)
        if module is not None and hasattr(module, name):  # modules wrapped by PEFT have other attributes
            old = _scalars(module).get(name)
            if old != value:
                changes.append((path, name, old, value))
    return changes


def _scalars(module: nn.Module) -> dict[str, Scalar]:
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
    return {k: v for k, v in plain.items() if v is None or isinstance(v, (bool, int, float, str))}


def setting_edits(changed: list[tuple[str, str, Scalar, Scalar]], site: Site, stack: str) -> list[Edit]:
    """Return the edits for the result of `changed_settings`."""
    return [
        SetAttribute(
            site=site,
            path=f"{path}.{name}".lstrip("."),
            before=brief(old),
            after=brief(new),
            stack=stack,
            module=path,
            name=name,
            value=new,
        )
        for path, name, old, new in changed
    ]


def is_mask(buffer: Tensor) -> bool:
    """Return whether a buffer has an entry for each pair of positions, [..., P, P] with P > 1."""
    return buffer.dim() > 1 and buffer.shape[-1] == buffer.shape[-2] > 1


def grown_mask(owner: Any, old: Tensor, length: int) -> Tensor:
    """Return the causal mask `old` [..., P, P] of the attention module `owner` for another length, on its device.

    If its last row does not see all keys, the row gives the window; only the config has a window longer than the mask.
    """
    full = torch.ones((*old.shape[:-2], length, length), dtype=torch.bool, device=old.device).tril()
    window = None
    if holds_values(old) and not old[..., -1, :].all():
        window = int(old.reshape(-1, old.shape[-1])[-1].sum())
    elif getattr(owner, "attention_type", None) == "local":
        window = owner.config.window_size
    return (full if window is None else full & ~full.tril(-window)).to(old.dtype)


def grow_buffer(root: nn.Module, path: str, length: int) -> None:
    """Make the buffer [1, P] or [P] at `path` at least `length` long: position ids continue, others are zeros."""
    owner, leaf = owner_of(root, path)
    setattr(owner, leaf, grown(owner, getattr(owner, leaf), name=leaf, length=length))


def grown(owner: nn.Module, old: Tensor, *, name: str, length: int) -> Tensor:
    """Return the buffer called `name` of the module `owner`, [1, P] or [P], at least `length` long."""
    if old.shape[-1] >= length:
        return old
    if name == "position_ids":
        return torch.arange(length, dtype=old.dtype, device=old.device).expand((*old.shape[:-1], -1))
    return torch.zeros((1, length), dtype=old.dtype, device=old.device)


class BufferEdit(BuiltByConfig, TouchesNothing, ABC):
    """Base of the edits that replace the buffer at `path` by what a stock model of the new length has there."""

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        restore_buffers(model, saved)


@dataclass(frozen=True, kw_only=True)
class GrowMask(BufferEdit):
    """Gives a causal mask [..., P, P] the length in the config; stock code recreates it in that size.

    Attributes:
        length: P, afterwards.
    """

    length: int

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        replace_buffer(model, self.path, lambda owner, old: grown_mask(owner, old, self.length), saved)

    def check(self, model: PreTrainedModel) -> str | None:
        length = model.get_buffer(self.path).shape[-1]
        return None if length == self.length else f"its mask has {length} positions instead of {self.length}"


@dataclass(frozen=True, kw_only=True)
class ResizeBuffer(BufferEdit):
    """Gives an unused buffer the shape in a fresh model of the new length, filled with zeros.

    transformers fills it when it loads the model, by the length in the config.

    Attributes:
        shape: afterwards.
    """

    shape: tuple[int, ...]

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        replace_buffer(model, self.path, lambda owner, old: old.new_zeros(self.shape), saved)

    def check(self, model: PreTrainedModel) -> str | None:
        owner, leaf = owner_of(model, self.path)
        shape = tuple(getattr(owner, leaf).shape)
        return None if shape == self.shape else f"it has shape {list(shape)} instead of {list(self.shape)}"
