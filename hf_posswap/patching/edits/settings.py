"""Edits of plain values: an attribute of a module, a value of the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posswap.families.rope_config import config_at
from hf_posswap.patching.edits.edit import Edit, Saved, Site
from hf_posswap.patching.edits.restore import replace_attribute, restore_attributes
from hf_posswap.utils.format import brief


@dataclass(frozen=True, kw_only=True)
class SetAttribute(Edit):
    """Sets a plain attribute of a module to what a fresh model of the new config has there.

    Attributes:
        module: path of the module.
        name: of the attribute.
        value: that it is given.
    """

    module: str
    name: str
    value: Any

    def apply(self, model: Any, saved: Saved) -> None:
        replace_attribute(model, self.module, self.name, self.value, saved)

    def undo(self, model: Any, saved: Saved) -> None:
        restore_attributes(model, self.module, saved)

    def check(self, model: Any) -> str | None:
        found = getattr(model.get_submodule(self.module), self.name, self.value)  # BigBird exchanges modules by itself
        return None if found == self.value else f"it is {found!r} instead of {self.value!r}"

    def reload(self, model: Any) -> None:
        """Nothing: transformers has built the model from the new config."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class EditConfig(Edit):
    """Sets a value, at `path` in the model's config, which is the swapped model's own copy and needs no undo.

    Attributes:
        value: that it is given.
    """

    value: Any

    def apply(self, model: Any, saved: Saved) -> None:
        part, _, leaf = self.path.rpartition(".")
        setattr(config_at(model.config, part), leaf, self.value)

    def undo(self, model: Any, saved: Saved) -> None:
        """Nothing: the model gets its own config back."""

    def check(self, model: Any) -> str | None:
        found = config_at(model.config, self.path)
        return None if found == self.value else f"the config says {found!r} instead of {self.value!r}"

    def reload(self, model: Any) -> None:
        """Nothing: the checkpoint's config says it."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


Scalar = bool | int | float | str | None


def changed_settings(
    model: nn.Module, fresh: nn.Module, left_out: tuple[str, ...]
) -> list[tuple[str, str, Scalar, Scalar]]:
    """Return where a `fresh` model of the new config differs from `model` in plain attributes: path, name, old, new.

    Some families read the rope parameters outside their rotary modules too (the attention scale of multi-head latent
    attention, say); a swap must change those as well.

    Args:
        model: as it is.
        fresh: as the new config makes one.
        left_out: paths of modules that are replaced as a whole.
    """
    found = []
    new = dict(fresh.named_modules())
    for path, module in model.named_modules():
        if path in left_out or path not in new:
            continue
        for name, value in _scalars(new[path]).items():
            old = _scalars(module).get(name)
            if old != value and hasattr(module, name):
                found.append((path, name, old, value))
    return found


def settings_to_follow(
    model: nn.Module, before: nn.Module, after: nn.Module, left_out: tuple[str, ...]
) -> list[tuple[str, str, Scalar, Scalar]]:
    """Return, as `changed_settings` does, which plain attributes of `model` follow a change of its config.

    What its user has set otherwise than the config says (a dropout of 0, a scaling, an epsilon) is left as it is.

    Args:
        model: as it is.
        before: a fresh model of the config that it has.
        after: a fresh model of the new config.
        left_out: paths of modules that are replaced as a whole.
    """
    modules, found = dict(model.named_modules()), []
    for path, name, _, value in changed_settings(before, after, left_out):
        module = modules.get(path)
        if module is not None and hasattr(module, name):  # what PEFT has wrapped has other attributes
            old = _scalars(module).get(name)
            if old != value:
                found.append((path, name, old, value))
    return found


def _scalars(module: nn.Module) -> dict[str, Scalar]:
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
    return {k: v for k, v in plain.items() if v is None or isinstance(v, (bool, int, float, str))}


def setting_edits(changed: list[tuple[str, str, Scalar, Scalar]], site: Site, stack: str) -> list[Edit]:
    """Return the edits that set what `changed_settings` found."""
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
