"""What is peculiar to the attention of some kinds of model: a class with the interface, positions inside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

NativeScheme = dict[str, Any]
"""A position mechanism as `Scheme.to_dict` writes it: families know schemes by name alone."""


@dataclass(frozen=True)
class RelativePart:
    """Positions inside the attention of a kind of model that are no scheme: they stay beside one, or go.

    Attributes:
        config_name: the config value that says whether they are there.
        switches: patterns of the modules, from the base model, whose attribute of that name puts them in force.
        weights: patterns of the modules, from the base model, that are out of use without them.
    """

    config_name: str
    switches: tuple[str, ...]
    weights: tuple[str, ...]

    def is_in(self, config: Any) -> bool:
        """Return whether a model of `config` has them."""
        return bool(getattr(config, self.config_name, False))


@dataclass(frozen=True)
class AttentionTraits:
    """What differs in the attention of one stack from what transformers promises of its newer models.

    Attributes:
        interface: of a self-attention module, the class with transformers' AttentionInterface that equals its own (or
            that class itself, if it has the interface), or why there is none; None: it has the interface.
        positions: of a config, the position mechanism that is native inside attention; None: none is.
        scheme: the name of that mechanism, for lists that have no config; None: there is none.
        switch: path, from the base model, and name of the attribute that is true where that mechanism is made.
        made_from: pattern of the embeddings, from the base model, that it is made from; "": none.
        angles: path, from the base model, of the module that makes its angles in releases that have one; "": none.
        causal: of a config, whether a query sees only its past; None: the attention modules say it.
        length_name: the config value that says how many positions the model was made for; None: it has none.
        length: positions that it was made for, where its config does not say.
        heads: of a config, how many heads attend and how wide they are; None: as it says usually.
        closed: of a config, why nothing can be put inside its attention, or None; None: nothing speaks against it.
        relative: positions inside attention that are no scheme; None: there are none.
        ends: whether its own causal mask ends where the original length does.
        position_source: what the mechanism that is native inside attention counts; None: what all of the stack does.
        eager_masks: whether the masks that the model makes are for eager attention alone.
    """

    interface: Callable[[nn.Module], type | str] | None = None
    positions: Callable[[Any], NativeScheme | None] | None = None
    scheme: str | None = None
    switch: tuple[str, str] | None = None
    made_from: str = ""
    angles: str = ""
    causal: Callable[[Any], bool] | None = None
    length_name: str | None = "max_position_embeddings"
    length: int = 2048
    heads: Callable[[Any], tuple[int, int]] | None = None
    closed: Callable[[Any], str | None] | None = None
    relative: RelativePart | None = None
    ends: bool = False
    position_source: Literal["arange", "relative"] | None = None
    eager_masks: bool = False

    def inside(self, config: Any) -> NativeScheme | None:
        """Return the position mechanism that is native inside attention, or None."""
        return None if self.positions is None else self.positions(config)

    def made_for(self, config: Any) -> int:
        """Return the positions, in tokens, that a model of `config` was made for."""
        said = None if self.length_name is None else getattr(config, self.length_name, None)
        return self.length if said is None else said
