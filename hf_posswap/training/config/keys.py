"""The keys of a recipe, read from its dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from hf_posswap.training.config.theirs import TrainingSettings, said


@dataclass(frozen=True)
class Key:
    """One key that a recipe can give.

    Attributes:
        name: with dots, `[]` after what is a list of further keys.
        owner: the dataclass that documents it.
        field: its name there.
        default: its value where no file gives it.
    """

    name: str
    owner: type
    field: str
    default: Any


def keys_of(cls: type, above: str = "") -> Iterator[Key]:
    """Return the keys below `above` that the dataclass `cls` stands for, of nested dataclasses too; `training` is one.

    Example:
        >>> from hf_posswap.training.config.settings import Recipe
        >>> [key.name for key in keys_of(Recipe)][:3]
        ['model.name', 'model.tokenizer', 'model.revision']
    """
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, name = hints[field.name], f"{above}{field.name}"
        items = [item for item in get_args(kind) if dataclasses.is_dataclass(item)]
        if dataclasses.is_dataclass(kind) and kind is not TrainingSettings:
            yield from keys_of(kind, f"{name}.")  # type: ignore[arg-type]
        elif get_origin(kind) is tuple and items:
            yield from keys_of(items[0], f"{name}[].")  # type: ignore[arg-type]
        else:
            made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            yield Key(name, cls, field.name, said(made) if isinstance(made, TrainingSettings) else made)
