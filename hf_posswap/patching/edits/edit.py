"""The base of edits: one change of one model each, how it is written as JSON, and what its planning takes and gives."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import Scheme, make_scheme

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Site = Literal["embedding", "rotary", "attention", "config"]
Saved = dict[str, Any]
"""What an edit removed from a model, by name: all that its `undo` needs. It is copied and pickled with the model."""

EDITS: dict[str, type[Edit]] = {}
"""Every type of edit by class name."""
SiteChoice = Literal["auto", "attention"]
RelativeChoice = Literal["keep", "drop"]


def to_plain(value: object) -> object:
    """Return `value` as JSON.

    Example:
        >>> to_plain((1, "a"))
        {'$tuple': [1, 'a']}
    """
    if isinstance(value, Scheme):
        return {"$scheme": value.to_dict()}
    if isinstance(value, Geometry):
        return {"$geometry": to_plain(dataclasses.asdict(value))}
    if isinstance(value, tuple):
        return {"$tuple": [to_plain(item) for item in value]}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(value: object) -> Any:
    """Return the value that `to_plain` encoded.

    Example:
        >>> from_plain({"$tuple": [1, "a"]})
        (1, 'a')
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$scheme" in value:
        return make_scheme(value["$scheme"])
    if "$geometry" in value:
        return Geometry(**from_plain(value["$geometry"]))
    if "$tuple" in value:
        return tuple(from_plain(item) for item in value["$tuple"])
    return {key: from_plain(item) for key, item in value.items()}


@dataclass(frozen=True, kw_only=True)
class Edit(ABC):
    """One change: where, from what, to what.

    A subclass is a value: its fields are plain, or schemes and geometries, so that it can be compared, pickled and
    written as JSON. It registers itself and must implement each of the abstract methods, or take one from the bases
    below, which have ABC as a base and are not registered.

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

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if ABC not in cls.__bases__:
            EDITS[cls.__name__] = cls

    @abstractmethod
    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        """Make the change. Each step stores what `undo` needs in `saved` before it touches the model."""

    @abstractmethod
    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Undo the steps recorded in `saved`, also if `apply` was interrupted."""

    @abstractmethod
    def check(self, model: PreTrainedModel) -> str | None:
        """Return the problem if the change is not intact, or None."""

    @abstractmethod
    def reload(self, model: PreTrainedModel) -> None:
        """Apply the change to a model that stock transformers has loaded from a swapped checkpoint."""

    @property
    @abstractmethod
    def touches(self) -> tuple[str, ...]:
        """Name prefixes of the parameters that the change may replace, add or remove."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Return why the change cannot be made to `model` in its current state, or None."""
        return None

    def check_loaded(self, model: PreTrainedModel) -> str | None:
        """Return the problem with the weights of a model that stock transformers loaded, before `reload`; or None."""
        return None

    def freeze(self, model: nn.Module) -> None:
        """Freeze the weights that the change freezes, because loading makes every weight trainable."""
        return None

    def with_scheme(self, scheme: Scheme) -> Self:
        """Return the edit for `scheme`: the same type of scheme with other values."""
        return self

    def to_dict(self) -> dict[str, object]:
        """Return the edit as JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"edit": type(self).__name__} | {name: to_plain(value) for name, value in fields.items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Edit:
        """Return the edit that `to_dict` wrote."""
        fields = {name: from_plain(value) for name, value in values.items() if name != "edit"}
        return EDITS[values["edit"]](**fields)


class PluginOnly(Edit, ABC):
    """A change that only hf_posswap makes: stock classes refuse the checkpoint, and leave nothing to reload."""

    def reload(self, model: PreTrainedModel) -> None:
        """Nothing: no stock class loads a checkpoint with this change."""


class BuiltByConfig(Edit, ABC):
    """A change that transformers makes by itself where it builds the model from the new config."""

    def reload(self, model: PreTrainedModel) -> None:
        """Nothing: transformers has built the model from the new config."""


class AppliedAgain(Edit, ABC):
    """A change that is made again in a model that stock transformers has loaded."""

    def reload(self, model: PreTrainedModel) -> None:
        self.apply(model, {})


class TouchesNothing(Edit, ABC):
    """A change that neither replaces, adds nor removes a parameter."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


class TouchesModule(Edit, ABC):
    """A change of the parameters of the module at `path`."""

    @property
    def touches(self) -> tuple[str, ...]:
        return (f"{self.path}.",)


@dataclass(frozen=True)
class SwapContext:
    """The input of planning a site.

    Attributes:
        model: the transformers model, which is read and never changed; it may be on meta.
        sites: where its positions are.
        stack: the stack to plan.
        scheme: its new scheme, resolved.
        length: positions that the swapped model is meant for, in tokens.
        site: "auto" expresses the swap natively where it can be; "attention" always applies it inside attention.
        relative: whether to keep or drop relative positions that no scheme expresses; None: there are none.
    """

    model: Any
    sites: Sites
    stack: Stack
    scheme: Scheme
    length: int
    site: SiteChoice = "auto"
    relative: RelativeChoice | None = None

    @property
    def geometry(self) -> Geometry:
        """The shape of the stack, as the scheme sees it."""
        return self.stack.geometry

    @property
    def replaced_types(self) -> tuple[str, ...]:
        """The layer types whose native rotation the scheme replaces.

        A scheme that rotates q and k replaces it in layers that see all tokens; any other, in all rotary layers.
        """
        rotates = self.scheme.acts_inside and self.scheme.mechanism(self.geometry).turns
        return self.stack.full_attention_types if rotates else self.stack.rope_layer_types

    @property
    def model_name(self) -> str:
        """The name of the model in messages."""
        return type(self.model).__name__


@dataclass
class PlanDraft:
    """The result of one planning step; see `SwapPlan`.

    Attributes:
        edits: in order.
        values: config values by path.
        unused: disabled parameters by name, with their numbers of elements.
        added: new parameters by name, with their numbers of elements.
        notes: worth knowing.
        plugin: whether no stock config can express the swap.
        adaptation: the training that the model will need; "": unknown to this step.
    """

    edits: list[Edit] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    plugin: bool = False
    adaptation: str = ""

    def __add__(self, other: PlanDraft) -> PlanDraft:
        return PlanDraft(
            edits=self.edits + other.edits,
            values=self.values | other.values,
            unused=self.unused | other.unused,
            added=self.added | other.added,
            notes=self.notes + other.notes,
            plugin=self.plugin or other.plugin,
            adaptation=self.adaptation or other.adaptation,
        )


@dataclass
class Refusal:
    """Replaces a method of a swapped model.

    Attributes:
        model: name of the model's class.
        why: the reason for the refusal, as part of a sentence.
        message: with the names of both in braces.
    """

    model: str
    why: str
    message: str

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedSwapError: always.
        """
        raise UnsupportedSwapError(self.message.format(model=self.model, why=self.why))
