"""Edits of plain values: an attribute of a module, a value of the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posswap.families.modules import get
from hf_posswap.families.rope_config import config_at
from hf_posswap.patching.edits.edit import Edit, Saved, Site
from hf_posswap.patching.edits.restore import replace_attribute, restore_attributes
from hf_posswap.utils.format import brief


@dataclass(frozen=True, kw_only=True)
class SetAttribute(Edit):
    """Sets a plain attribute of a module to its value in a fresh model of the new config.

    Attributes:
        module: path of the module.
        name: of the attribute.
        value: its new value.
    """

    module: str
    name: str
    value: Any

    def apply(self, model: Any, saved: Saved) -> None:
        replace_attribute(model, self.module, self.name, self.value, saved)

    def undo(self, model: Any, saved: Saved) -> None:
        restore_attributes(model, self.module, saved)

    def check(self, model: Any) -> str | None:
        actual = getattr(model.get_submodule(self.module), self.name, self.value)  # BigBird replaces modules itself
        return None if actual == self.value else f"it is {actual!r} instead of {self.value!r}"

    def reload(self, model: Any) -> None:
        """Nothing: transformers has built the model from the new config."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class EditConfig(Edit):
    """Sets the value at `path` in the model's config, which is a copy for the swapped model and needs no undo.

    Attributes:
        value: its new value.
    """

    value: Any

    def apply(self, model: Any, saved: Saved) -> None:
        parent, _, leaf = self.path.rpartition(".")
        setattr(config_at(model.config, parent), leaf, self.value)

    def undo(self, model: Any, saved: Saved) -> None:
        """Nothing: the model gets its original config back."""

    def check(self, model: Any) -> str | None:
        actual = config_at(model.config, self.path)
        return None if actual == self.value else f"the config has {actual!r} instead of {self.value!r}"

    def reload(self, model: Any) -> None:
        """Nothing: the checkpoint's config has it."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


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
