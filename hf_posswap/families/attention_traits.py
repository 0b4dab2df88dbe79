"""Model-specific traits of attention: a class with the AttentionInterface, native positions inside attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

NativeScheme = dict[str, Any]
"""A position mechanism in the format of `Scheme.to_dict`: families refer to schemes only by name."""


@dataclass(frozen=True)
class RelativePart:
    """Relative positions inside attention that no scheme can express: a swap keeps or drops them.

    Attributes:
        config_name: the config value that says whether the model has them.
        switches: patterns of the modules, from the base model, whose attribute of that name enables them.
        weights: patterns of the modules, from the base model, that are unused without them.
    """

    config_name: str
    switches: tuple[str, ...]
    weights: tuple[str, ...]

    def is_in(self, config: Any) -> bool:
        """Return whether a model of `config` has them."""
        return bool(getattr(config, self.config_name, False))


@dataclass(frozen=True)
class AttentionTraits:
    """How the attention of one stack differs from the conventions of newer transformers models.

    Attributes:
        interface: maps a self-attention module to the class with transformers' AttentionInterface that equals its own
            (or that class itself, if it has the interface), or to the reason why there is none; None: it has the
            interface.
        positions: maps a config to the native position mechanism inside attention; None: there is none.
        scheme: the name of that mechanism, for lists without a config; None: there is none.
        switch: path, from the base model, and name of the attribute that is true if that mechanism is in use.
        made_from: pattern of the embeddings, from the base model, that it is computed from; "": none.
        angles: path, from the base model, of the module that computes its angles in releases that have one; "": none.
        causal: maps a config to whether a query sees only its past; None: the attention modules decide.
        length_name: the config value with the original length; None: the config has none.
        length: the original length if the config has none.
        heads: maps a config to the number and the width of attention heads; None: the usual config values.
        closed: maps a config to the reason why no scheme fits inside its attention, or to None; None: any config works.
        relative: relative positions inside attention that no scheme expresses; None: there are none.
        ends: whether its own causal mask ends at the original length.
        position_source: what the native mechanism inside attention counts; None: the same as the stack.
        eager_masks: whether the model's masks only work with eager attention.
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
        """Return the original length, in tokens, of a model of `config`."""
        length = None if self.length_name is None else getattr(config, self.length_name, None)
        return self.length if length is None else length
