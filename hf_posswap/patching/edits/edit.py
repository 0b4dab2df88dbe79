"""The base of edits: one change of one model, with its description, apply, undo and check in one place."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from hf_posswap.patching.edits.codec import from_plain, to_plain
from hf_posswap.schemes.base import Scheme

Site = Literal["embedding", "rotary", "attention", "config"]
Saved = dict[str, Any]
"""What an edit removed from a model, by name: all that its `undo` needs. It is copied and pickled with the model."""

EDITS: dict[str, type[Edit]] = {}
"""Every type of edit by class name."""


@dataclass(frozen=True, kw_only=True)
class Edit(ABC):
    """One change: where, from what, to what.

    A subclass is a value: its fields are plain, or schemes and geometries, so that it can be compared, pickled and
    written as JSON. It registers itself and must implement each of the abstract methods.

    Attributes:
        site: "embedding", "rotary", "attention" or "config".
        path: of the module (or of the config value) that it changes.
        before: description of the old state.
        after: description of the new state.
        stack: name of its stack.
    """

    needs_weights: ClassVar[bool] = False
    """Whether it reads or replaces the weights of the module at `path`, which must then be in memory."""

    site: Site
    path: str
    before: str
    after: str
    stack: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        EDITS[cls.__name__] = cls

    @abstractmethod
    def apply(self, model: Any, saved: Saved) -> None:
        """Make the change. Each step stores what `undo` needs in `saved` before it touches the model."""

    @abstractmethod
    def undo(self, model: Any, saved: Saved) -> None:
        """Undo the steps recorded in `saved`, also if `apply` was interrupted."""

    @abstractmethod
    def check(self, model: Any) -> str | None:
        """Return the problem if the change is not intact, or None."""

    @abstractmethod
    def reload(self, model: Any) -> None:
        """Apply the change to a model that stock transformers has loaded from a swapped checkpoint."""

    @property
    @abstractmethod
    def touches(self) -> tuple[str, ...]:
        """Name prefixes of the parameters that the change may replace, add or remove."""

    def refusal(self, model: Any) -> str | None:
        """Return why the change cannot be made to `model` in its current state, or None."""
        return None

    def check_loaded(self, model: Any) -> str | None:
        """Return the problem with the weights of a model that stock transformers loaded, before `reload`; or None."""
        return None

    def freeze(self, model: Any) -> None:
        """Freeze the weights that the change freezes, because loading makes every weight trainable."""
        return None

    def with_scheme(self, scheme: Scheme) -> Self:
        """Return the edit for `scheme`: the same type of scheme with other values."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the edit as JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"edit": type(self).__name__} | {name: to_plain(value) for name, value in fields.items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Edit:
        """Return the edit that `to_dict` wrote."""
        fields = {name: from_plain(value) for name, value in values.items() if name != "edit"}
        return EDITS[values["edit"]](**fields)
