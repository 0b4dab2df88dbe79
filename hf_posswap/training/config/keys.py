"""The keys of a recipe, read from its dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from hf_posswap.training.config.theirs import TrainingSettings, non_default_settings


@dataclass(frozen=True)
class Key:
    """One key that a recipe can give.

    Attributes:
        name: dotted, with `[]` after a list of further keys.
        owner: the dataclass that documents it.
        field: its name there.
        default: its value if no file sets it.
    """

    name: str
    owner: type
    field: str
    default: Any


def keys_of(cls: type, above: str = "") -> Iterator[Key]:
    """Yield the keys of the dataclass `cls` and of nested dataclasses, prefixed by `above`; `training` is one key.

    Example:
        >>> from hf_posswap.training.config.settings import Recipe
        >>> [key.name for key in keys_of(Recipe)][:3]
        ['model.name', 'model.tokenizer', 'model.revision']
    """
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], f"{above}{field.name}"
        item_classes = [item for item in get_args(hint) if dataclasses.is_dataclass(item)]
        if dataclasses.is_dataclass(hint) and hint is not TrainingSettings:
            yield from keys_of(hint, f"{name}.")  # type: ignore[arg-type]
        elif get_origin(hint) is tuple and item_classes:
            yield from keys_of(item_classes[0], f"{name}[].")  # type: ignore[arg-type]
        else:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            yield Key(
                name,
                cls,
                field.name,
                non_default_settings(default) if isinstance(default, TrainingSettings) else default,
            )
