"""Several parts at work in the same attention: a rotation, biases, query scales; and what the model itself has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.base import PARTS, SCHEMES, Kind, Scheme, Traits, make_scheme
from hf_posswap.schemes.common.piece import Keys, Piece
from hf_posswap.schemes.layered import combined
from hf_posswap.schemes.mechanism import Mechanism, by_head
from hf_posswap.schemes.rope import Rope
from hf_posswap.utils.printable import brief_repr


@PARTS.register("native")
@dataclass(frozen=True)
class Native(Scheme):
    """The model's own mechanism, untouched: a part of a sum; alone it would change nothing.

    Attributes:
        of: the rotation of the model: "rotary", whose angles are the same at every length, or "dynamic", whose angles
            follow the length; None detects it. A plan writes what other models have as a scheme: learned, alibi, t5.

    Example:
        >>> str(native() + "alibi")
        'native + alibi'
    """

    name: ClassVar[str] = "native"
    summary: ClassVar[str] = "what the model has, as a part of a sum"
    source: ClassVar[str] = "https://huggingface.co/docs/transformers"
    kind: ClassVar[Kind] = "mixed"
    alone: ClassVar[bool] = False

    of: Literal["rotary", "dynamic"] | None = None

    @property
    def keeps_native(self) -> bool:
        return True

    @property
    def traits(self) -> Traits:
        return Traits(prefix_consistent=self.of != "dynamic", training_free=True)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        if geometry.base is None:
            raise SchemeError(f"{self.name}: the model does not rotate queries and keys: there is no rotation to keep.")
        of: Literal["rotary", "dynamic"] = "dynamic" if geometry.frequencies is None else "rotary"
        if self.of not in (None, of):
            raise SchemeError(f"{self.name}: of={self.of!r}, but the model's rotation is {of}; leave it out.")
        return dataclasses.replace(self, of=of)


def native() -> Native:
    """Return what stands for the mechanism that a model has, to add to it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_posswap import patch_model, swap_plan
        >>> sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, **sizes))
        >>> str(swap_plan(patch_model(model, native() + "alibi")).scheme)
        "native(of='rotary') + alibi"
    """
    return Native()


@SCHEMES.register("sum")
@dataclass(frozen=True)
class Sum(Scheme):
    """Several parts in the same attention: `Rope() + Alibi()`, `native() + SSMax()`.

    At most one part rotates queries and keys or splits attention into regions; biases are added up; query scales are
    multiplied. `native()` among the parts keeps the mechanism that the model has.

    Attributes:
        parts: the parts (objects, names or dicts), at least two.

    Example:
        >>> str(Rope(base=500.0) + Alibi())
        'rope(base=500.0) + alibi'
    """

    __repr__ = Scheme.short_repr

    name: ClassVar[str] = "sum"
    summary: ClassVar[str] = "a rotation, biases and query scales in the same attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2104.09864"
    kind: ClassVar[Kind] = "mixed"

    parts: tuple[Scheme, ...] = (Rope(), Alibi())

    def __post_init__(self) -> None:
        if isinstance(self.parts, (str, bytes)) or not isinstance(self.parts, Iterable):
            raise SchemeError(f"{self.name}: parts must be a list of schemes, got {brief_repr(self.parts)}.")
        parts = tuple(part for given in self.parts for part in _flat(make_scheme(given)))
        if len(parts) < 2:
            raise SchemeError(f"{self.name}: parts must be at least two schemes, got {', '.join(map(str, parts))}.")
        if sum(isinstance(part, Native) for part in parts) > 1:
            raise SchemeError(f"{self.name}: native stands for all that the model has, so give it once.")
        _refuse_two_rotations([str(part) for part in parts if part.kind == "rotary"])
        object.__setattr__(self, "parts", parts)

    @property
    def native(self) -> Native | None:
        """The part that keeps the model's own mechanism, or None."""
        return next((part for part in self.parts if isinstance(part, Native)), None)

    @property
    def added(self) -> tuple[Scheme, ...]:
        """The parts other than `native`."""
        return tuple(part for part in self.parts if not isinstance(part, Native))

    @property
    def keeps_native(self) -> bool:
        return self.native is not None

    @property
    def only_inside(self) -> bool:
        return self.native is None

    def with_native(self, scheme: Scheme) -> Scheme:
        """Return the sum with `scheme` in the place of `native`."""
        first, *others = (scheme, *self.added) if scheme.table_part is not None else self._with_native(scheme)
        for other in others:
            first = first + other
        return first

    def _with_native(self, scheme: Scheme) -> tuple[Scheme, ...]:
        return tuple(scheme if isinstance(part, Native) else part for part in self.parts)

    @property
    def traits(self) -> Traits:
        return combined(self.parts)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        resolved = dataclasses.replace(self, parts=tuple(part.resolve(geometry, max_length) for part in self.parts))
        _refuse_together(resolved, geometry)
        return resolved

    def reach(self, geometry: Geometry) -> int | None:
        reached = [part.reach(geometry) for part in self.parts]
        return min((length for length in reached if length is not None), default=None)

    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for part in self.parts for note in part.notes()))

    def mechanism(self, geometry: Geometry) -> SumMechanism:
        return SumMechanism([part.mechanism(geometry) for part in self.added])

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))


def _flat(part: Scheme) -> tuple[Scheme, ...]:
    """Return the parts of a sum, or the part itself.

    Raises:
        SchemeError: it cannot be a part.
    """
    if isinstance(part, Sum):
        return part.parts
    if part.table_part is not None:
        raise SchemeError(
            f"sum: {part} is not inside attention, and all parts of a sum are. Add a table by +: Learned() + Rope()."
        )
    if not isinstance(part, Native) and not part.only_inside:
        raise SchemeError(f"sum: {part} combines schemes by layer or by weight; make it of sums, not a sum of it.")
    if part.kind == "none" and not part.acts_inside:
        raise SchemeError(f"sum: {part} does nothing, so it adds nothing: leave it out.")
    return (part,)


def _refuse_two_rotations(turning: list[str]) -> None:
    """Refuse more than one of what rotates queries and keys."""
    if len(turning) > 1:
        raise SchemeError(
            f"sum: {' and '.join(turning)} each rotate queries and keys, which are rotated once: their angles do not "
            "add up to a scheme. Give one of them; biases and query scales can be added to it."
        )


def _refuse_together(scheme: Sum, geometry: Geometry) -> None:
    """Refuse parts of a resolved sum that cannot be at work together."""
    made = [(part, part.mechanism(geometry)) for part in scheme.added]
    turning = [str(part) for part, mechanism in made if mechanism.rotates or mechanism.splits]
    if scheme.native is not None:
        turning.insert(0, f"native (rope, theta {geometry.base:g})")
    _refuse_two_rotations(turning)
    splitting = next((part for part, mechanism in made if mechanism.splits), None)
    biased = next((part for part, mechanism in made if mechanism.biases), None)
    if splitting is not None and biased is not None:
        raise SchemeError(
            f"{scheme.name}: {splitting.name} computes the scores region by region, which takes no bias, so "
            f"{biased.name} cannot be added. What works: a query scale (ssmax), or {biased.name} with a scheme that "
            "rotates once (rope, yarn)."
        )
    seeing = [part for part in scheme.parts if part.kind != "none"]
    if not seeing:
        raise SchemeError(
            f"{scheme.name}: {' and '.join(map(str, scheme.parts))} only scale queries, so there would be no "
            "positions; add native() (on the command line native), a rotation or a bias. For no positions and a scale: "
            "nope with logit_scale."
        )


class SumMechanism(Mechanism):
    """The parts of a sum at work: one rotates or splits, the biases are added, the scales multiplied."""

    def __init__(self, parts: list[Mechanism]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._turning = next((i for i, part in enumerate(parts) if part.rotates or part.splits), None)
        if self._turning is not None:
            turning = parts[self._turning]
            self.rotates, self.splits, self.head_dim = turning.rotates, turning.splits, turning.head_dim
            self.stores_rotated_keys, self.regions = turning.stores_rotated_keys, turning.regions
            self.keys_per_token, self.turns_on = turning.keys_per_token, turning.turns_on
        self._biased = tuple(i for i, part in enumerate(parts) if part.biases)
        self._scaled = tuple(i for i, part in enumerate(parts) if part.scales)
        self.biases, self.scales = bool(self._biased), bool(self._scaled)
        biased = [parts[i] for i in self._biased]
        self.distance_only = self.biases and all(part.distance_only for part in biased)
        slopes = [part.slopes for part in biased if part.slopes is not None]
        self.slopes = torch.stack(slopes).sum(dim=0) if slopes and len(slopes) == len(biased) else None

    @property
    def turning(self) -> Mechanism:
        """The part that rotates or splits."""
        assert self._turning is not None, "no part of this sum rotates"
        return self._part(self._turning)

    def _part(self, index: int) -> Mechanism:
        part = self.parts[index]
        assert isinstance(part, Mechanism)
        return part

    def prepare(self, positions: Tensor, length: Tensor) -> Any:
        return self.turning.prepare(positions, length)

    def rotate_query(self, query: Tensor, prepared: Any) -> Tensor:
        return self.turning.rotate_query(query, prepared)

    def rotate_key(self, key: Tensor, prepared: Any) -> Tensor:
        return self.turning.rotate_key(key, prepared)

    def rotate_far(self, key: Tensor, prepared: Any) -> Tensor:
        return self.turning.rotate_far(key, prepared)

    def pieces(self, query_positions: Tensor, key_positions: Tensor, *, keys: Keys = "raw") -> tuple[Piece, ...]:
        return self.turning.pieces(query_positions, key_positions, keys=keys)

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        first, *others = (self._part(i).bias(query_positions, key_positions) for i in self._biased)
        for other in others:
            first = first + other
        return first

    def distance_bias(self, distances: Tensor) -> Tensor:
        first, *others = (self._part(i).distance_bias(distances) for i in self._biased)
        for other in others:
            first = first + other
        return first

    def scale(self, query_positions: Tensor) -> Tensor:
        first, *others = (self._part(i).scale(query_positions) for i in self._scaled)
        for other in others:
            first = by_head(first) * by_head(other)
        return first
