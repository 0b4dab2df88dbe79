"""Schemes that differ from layer to layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import nn

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES, Kind, Scheme, Traits, make_scheme
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.nope import NoPE
from hf_posswap.schemes.rope import Rope, own_rope


def combined(schemes: Iterable[Scheme]) -> Traits:
    """Return the guarantees of a model with several schemes; NoPE in some layers leaves an encoder order-aware."""
    members = list(schemes)
    seeing = [scheme for scheme in members if scheme.kind != "none" or not scheme.standalone] or members
    return Traits(
        prefix_consistent=all(scheme.traits.prefix_consistent for scheme in members),
        causal_only=any(scheme.traits.causal_only for scheme in seeing),
        relative=all(scheme.traits.relative for scheme in members),
        training_free=all(scheme.traits.training_free for scheme in members),
        unbounded=all(scheme.traits.unbounded for scheme in members),
        shardable=all(scheme.traits.shardable for scheme in members),
    )


def inside(owner: str, field: str, value: Any, *, term: bool = False) -> Scheme:
    """Return `value` as a scheme if it acts inside attention or does nothing; with `term` also if it only adds to one.

    Raises:
        SchemeError: it is a table, or itself combines several schemes.
    """
    scheme = make_scheme(value)
    if not scheme.only_inside or not (scheme.standalone or term):
        raise SchemeError(
            f"{owner}: {field} must be a scheme that acts inside attention (rope, alibi, ...) or nope, got {scheme}."
        )
    return scheme


@dataclass(frozen=True)
class Layered(Scheme):
    """Base of schemes that differ from layer to layer. Layers are counted from 0 in the order of the model."""

    kind: ClassVar[Kind] = "mixed"

    def parts(self) -> tuple[Scheme, ...]:
        """Return the schemes that any layer may have."""
        raise NotImplementedError

    def of_layer(self, layer: int) -> Scheme:
        """Return the scheme of a layer."""
        raise NotImplementedError

    @property
    def traits(self) -> Traits:
        return combined(self.parts())

    def reach(self, geometry: Geometry) -> int | None:
        reached = [member.reach(geometry) for member in self.parts()]
        return min((length for length in reached if length is not None), default=None)

    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for member in self.parts() for note in member.notes()))

    def mechanism(self, geometry: Geometry) -> LayeredMechanism:
        return LayeredMechanism(self, geometry)


class LayeredMechanism(Mechanism):
    """One mechanism for each different scheme among the layers; layers with the same scheme share it."""

    def __init__(self, scheme: Layered, geometry: Geometry) -> None:
        super().__init__()
        chosen = [scheme.of_layer(layer) for layer in range(geometry.num_layers)]
        different = list(dict.fromkeys(chosen))
        self.parts = nn.ModuleList([member.mechanism(geometry) for member in different])
        self.index = tuple(different.index(member) for member in chosen)

    def for_layer(self, layer: int) -> Mechanism:
        mechanism = self.parts[self.index[layer]]
        assert isinstance(mechanism, Mechanism)
        return mechanism


@SCHEMES.register("per_layer")
@dataclass(frozen=True)
class PerLayer(Layered):
    """A scheme of your choice for each layer.

    Attributes:
        layers: layer to scheme (an object, a name or a dict); all other layers use `default`.
        default: scheme of the other layers; None: `layers` lists every layer.

    Example:
        >>> scheme = Rope().per_layer({0: NoPE(), 1: "alibi"})
        >>> [scheme.of_layer(layer).name for layer in range(4)]
        ['nope', 'alibi', 'rope', 'rope']
    """

    __repr__ = Scheme.short_repr

    name: ClassVar[str] = "per_layer"
    summary: ClassVar[str] = "another scheme in each layer, as you choose"
    source: ClassVar[str] = "https://arxiv.org/abs/2501.18795"

    layers: tuple[tuple[int, Scheme], ...] = ()
    default: Scheme | None = None

    def __post_init__(self) -> None:
        given = self.layers
        are_pairs = isinstance(given, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in given)
        if not isinstance(given, Mapping) and not are_pairs:
            raise SchemeError(f"{self.name}: layers must map layers to schemes, as in {{0: 'rope'}}, got {given!r}.")
        pairs = given.items() if isinstance(given, Mapping) else given
        layers = {_layer(self.name, key): inside(self.name, f"layers[{key}]", value) for key, value in pairs}
        object.__setattr__(self, "layers", tuple(sorted(layers.items())))
        if self.default is not None:
            object.__setattr__(self, "default", inside(self.name, "default", self.default))

    @classmethod
    def stand_ins(cls, geometry: Geometry) -> dict[str, object]:
        return {"layers": {0: NoPE()}, "default": Rope()}

    def parts(self) -> tuple[Scheme, ...]:
        return tuple(dict.fromkeys((*dict(self.layers).values(), *([self.default] if self.default else []))))

    def of_layer(self, layer: int) -> Scheme:
        scheme = dict(self.layers).get(layer, self.default)
        if scheme is None:
            raise SchemeError(f"{self.name}: layer {layer} has no scheme, and there is no default.")
        return scheme

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        named, count = dict(self.layers), geometry.num_layers
        beyond = [layer for layer in named if layer >= count]
        missing = [layer for layer in range(count) if layer not in named] if self.default is None else []
        if beyond or missing:
            raise SchemeError(
                f"{self.name}: the model has layers 0 to {count - 1}; "
                + (f"there is no layer {beyond[0]}." if beyond else f"layer {missing[0]} has no scheme, nor a default.")
            )
        layers = tuple((layer, scheme.resolve(geometry, max_length)) for layer, scheme in self.layers)
        default = self.default and self.default.resolve(geometry, max_length)
        return dataclasses.replace(self, layers=layers, default=default)

    def to_dict(self) -> dict[str, object]:
        layers = {str(layer): scheme.to_dict() for layer, scheme in self.layers}
        return {"name": self.name, "layers": layers, "default": self.default and self.default.to_dict()}

    def __str__(self) -> str:
        shown = [f"{layer}: {scheme}" for layer, scheme in self.layers]
        return f"per_layer({', '.join(shown + ([f'others: {self.default}'] if self.default else []))})"


@SCHEMES.register("rnope")
@dataclass(frozen=True)
class RNoPE(Layered):
    """RNoPE, iRoPE: rotary layers with layers without positions between them.

    As SmolLM3 and Llama 4 have it: NoPE in layer n where (n + 1) mod `every` = 0.

    Attributes:
        every: how often a layer has no positions, >= 2, counted from 1; None takes 4, where `layers` is not given.
        layers: the layers without positions; replaces `every`.
        rotary: scheme of the other layers; None keeps the model's own angles (plain RoPE where it has none).
        logit_scale: c of the scale 1 + c ln s on the scores of layers without positions; None scales nothing.
        original_length: L of that scale, in tokens; None takes the model's own.

    Example:
        >>> [RNoPE().of_layer(layer).name for layer in range(5)]
        ['rope', 'rope', 'rope', 'nope', 'rope']
    """

    name: ClassVar[str] = "rnope"
    summary: ClassVar[str] = "RNoPE, iRoPE: rotary layers, and every n-th without positions"
    source: ClassVar[str] = "https://arxiv.org/abs/2501.18795"

    every: int | None = None
    layers: tuple[int, ...] | None = None
    rotary: Scheme | None = None
    logit_scale: float | None = None
    original_length: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            checks.whole(self.name, "every", self.every, minimum=2, maximum=2**16)
        if self.layers is not None:
            if isinstance(self.layers, str) or not isinstance(self.layers, Iterable) or not list(self.layers):
                raise SchemeError(f"{self.name}: layers must be a list of whole numbers >= 0, got {self.layers!r}.")
            object.__setattr__(self, "layers", tuple(sorted({_layer(self.name, layer) for layer in self.layers})))
            if self.every is not None:
                raise SchemeError(f"{self.name}: give every={self.every} or layers={list(self.layers)}, not both.")
        if self.rotary is not None:
            rotary = inside(self.name, "rotary", self.rotary)
            if rotary.kind != "rotary":
                raise SchemeError(f"{self.name}: rotary must be a rotary scheme, got {rotary}.")
            object.__setattr__(self, "rotary", rotary)
        if self.logit_scale is not None:
            checked = checks.number(self.name, "logit_scale", self.logit_scale, minimum=0.0, maximum=1e6)
            object.__setattr__(self, "logit_scale", checked)
        if self.original_length is not None:
            checks.length(self.name, "original_length", self.original_length)

    def parts(self) -> tuple[Scheme, ...]:
        return self.rotary or Rope(), NoPE(self.logit_scale, original_length=self.original_length)

    def of_layer(self, layer: int) -> Scheme:
        rotary, still = self.parts()
        free = layer in self.layers if self.layers is not None else (layer + 1) % (self.every or 4) == 0
        return still if free else rotary

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        count, free = geometry.num_layers, [n for n in range(geometry.num_layers) if self.of_layer(n).kind == "none"]
        beyond = [layer for layer in self.layers or () if layer >= count]
        if beyond:
            raise SchemeError(f"{self.name}: the model has layers 0 to {count - 1}; there is no layer {beyond[0]}.")
        if not free:
            raise SchemeError(
                f"{self.name}: with every={self.every or 4} none of the model's {count} layers would be without "
                "positions; give a smaller every, or layers."
            )
        rotary = (self.rotary or own_rope(self.name, geometry)).resolve(geometry, max_length)
        original = NoPE(self.logit_scale, original_length=self.original_length).resolve(geometry, None).original_length
        return dataclasses.replace(self, rotary=rotary, original_length=original)

    @classmethod
    def stand_ins(cls, geometry: Geometry) -> dict[str, object]:
        return {} if geometry.num_layers >= 4 else {"layers": [geometry.num_layers - 1]}


def _layer(owner: str, value: object) -> int:
    """Return `value` as a layer; JSON writes them as text."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return checks.whole(owner, "a layer", value, minimum=0, maximum=2**16)
