"""What an edit is: one change of one model, with its text, its doing, its undoing and its check in one place."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from hf_posswap.patching.edits.codec import from_plain, to_plain
from hf_posswap.schemes.base import Scheme

Site = Literal["embedding", "rotary", "attention", "config"]
Saved = dict[str, Any]
"""What an edit took out of a model, by name: all that its `undo` needs. It is copied and pickled with the model."""

EDITS: dict[str, type[Edit]] = {}
"""Every kind of edit by the name of its class."""


@dataclass(frozen=True, kw_only=True)
class Edit(ABC):
    """One change: where, from what, to what; and all that is known of it.

    A subclass is a value: its fields are plain, or schemes and geometries, so that it can be compared, pickled and
    written as JSON. It registers itself, and cannot be made without each of the abstract methods.

    Attributes:
        site: "embedding", "rotary", "attention" or "config".
        path: of the module (or of the config value) that it changes.
        before: what is there, in words.
        after: what will be there, in words.
        stack: name of the stack that it is in.
    """

    needs_weights: ClassVar[bool] = False
    """Whether it reads or replaces the weights of the module at `path`, which must then lie in memory."""

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
        """Make the change. What `undo` needs is put into `saved` before the model is touched, step by step."""

    @abstractmethod
    def undo(self, model: Any, saved: Saved) -> None:
        """Take back what `saved` says was done, all of it or as far as `apply` came."""

    @abstractmethod
    def check(self, model: Any) -> str | None:
        """Return what is wrong where the change was made, or None."""

    @abstractmethod
    def reload(self, model: Any) -> None:
        """Make of a model that stock transformers has loaded from a swapped checkpoint what a patched one is."""

    @property
    @abstractmethod
    def touches(self) -> tuple[str, ...]:
        """How the names of the parameters begin that the change may replace, add or take away."""

    def refusal(self, model: Any) -> str | None:
        """Return why the change cannot be made to `model` as it lies in memory, or None."""
        return None

    def check_loaded(self, model: Any) -> str | None:
        """Return what is wrong with the weights of a model that stock transformers loaded, before `reload`; or None."""
        return None

    def freeze(self, model: Any) -> None:
        """Freeze what the change freezes, in a model that carries it: loading makes every weight trainable."""
        return None

    def with_scheme(self, scheme: Scheme) -> Self:
        """Return the edit as it is once its stack has `scheme`, of the same kind with other numbers."""
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
