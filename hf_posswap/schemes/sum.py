"""Sums of schemes in the same attention: a rotation, biases, query scales; and what the model itself has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.piecewise_bias import PiecewiseBias
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.base import SCHEMES, TERMS, Kind, Scheme, Traits, make_scheme
from hf_posswap.schemes.common.piece import Keys, Piece
from hf_posswap.schemes.layered import combined
from hf_posswap.schemes.mechanism import Mechanism, by_head
from hf_posswap.schemes.rope import Rope
from hf_posswap.utils.printable import brief_repr


@TERMS.register("native")
@dataclass(frozen=True)
class Native(Scheme):
    """The model's own mechanism, untouched: a term of a sum; alone it would change nothing.

    Attributes:
        angles: of the rotation of the model: "fixed", the same at every length, or "dynamic", which follow the length;
            None detects it. A plan writes what other models have as a scheme: learned, alibi, t5.

    Example:
        >>> str(native() + "alibi")
        'native + alibi'
    """

    name: ClassVar[str] = "native"
    summary: ClassVar[str] = "what the model has, as a term of a sum"
    source: ClassVar[str] = "https://huggingface.co/docs/transformers"
    kind: ClassVar[Kind] = "mixed"
    standalone: ClassVar[bool] = False

    angles: Literal["fixed", "dynamic"] | None = None

    @property
    def keeps_native(self) -> bool:
        return True

    @property
    def traits(self) -> Traits:
        return Traits(prefix_consistent=self.angles != "dynamic", training_free=True)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        if geometry.base is None:
            raise SchemeError(f"{self.name}: the model does not rotate queries and keys: there is no rotation to keep.")
        angles: Literal["fixed", "dynamic"] = "dynamic" if geometry.frequencies is None else "fixed"
        if self.angles not in (None, angles):
            raise SchemeError(
                f"{self.name}: angles={self.angles!r}, but those of the model are {angles}; leave it out."
            )
        return dataclasses.replace(self, angles=angles)


def native() -> Native:
    """Return what stands for the mechanism that a model has, to add to it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_posswap import patch_model, swap_plan
        >>> sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, **sizes))
        >>> str(swap_plan(patch_model(model, native() + "alibi")).scheme)
        "native(angles='fixed') + alibi"
    """
    return Native()


@SCHEMES.register("sum")
@dataclass(frozen=True)
class Sum(Scheme):
    """Several terms in the same attention: `Rope() + Alibi()`, `native() + SSMax()`.

    At most one term rotates queries and keys or splits attention into regions; biases are added up; query scales are
    multiplied. `native()` among the terms keeps the mechanism that the model has.

    Attributes:
        terms: the terms (objects, names or dicts), at least two.

    Example:
        >>> str(Rope(base=500.0) + Alibi())
        'rope(base=500.0) + alibi'
    """

    __repr__ = Scheme.short_repr

    name: ClassVar[str] = "sum"
    summary: ClassVar[str] = "a rotation, biases and query scales in the same attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2104.09864"
    kind: ClassVar[Kind] = "mixed"

    terms: tuple[Scheme, ...] = (Rope(), Alibi())

    def __post_init__(self) -> None:
        if isinstance(self.terms, (str, bytes)) or not isinstance(self.terms, Iterable):
            raise SchemeError(f"{self.name}: terms must be a list of schemes, got {brief_repr(self.terms)}.")
        terms = tuple(term for given in self.terms for term in _flat(make_scheme(given)))
        if len(terms) < 2:
            raise SchemeError(f"{self.name}: terms must be at least two schemes, got {', '.join(map(str, terms))}.")
        if sum(isinstance(term, Native) for term in terms) > 1:
            raise SchemeError(f"{self.name}: native stands for all that the model has, so give it once.")
        _refuse_two_rotations([str(term) for term in terms if term.kind == "rotary"])
        object.__setattr__(self, "terms", terms)

    @property
    def native(self) -> Native | None:
        """The term that keeps the model's own mechanism, or None."""
        return next((term for term in self.terms if isinstance(term, Native)), None)

    @property
    def added(self) -> tuple[Scheme, ...]:
        """The terms other than `native`."""
        return tuple(term for term in self.terms if not isinstance(term, Native))

    @property
    def keeps_native(self) -> bool:
        return self.native is not None

    @property
    def only_inside(self) -> bool:
        return self.native is None

    def with_native(self, scheme: Scheme) -> Scheme:
        """Return the sum with `scheme` instead of `native`."""
        terms = [scheme if isinstance(term, Native) else term for term in self.terms]
        first, *others = sorted(terms, key=lambda term: term.table_part is None)  # a table is added to, never a term
        return sum(others, start=first)

    @property
    def traits(self) -> Traits:
        return combined(self.terms)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        resolved = dataclasses.replace(self, terms=tuple(term.resolve(geometry, max_length) for term in self.terms))
        _refuse_together(resolved, geometry)
        return resolved

    def reach(self, geometry: Geometry) -> int | None:
        reached = [term.reach(geometry) for term in self.terms]
        return min((length for length in reached if length is not None), default=None)

    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for term in self.terms for note in term.notes()))

    def mechanism(self, geometry: Geometry) -> SumMechanism:
        return SumMechanism([term.mechanism(geometry) for term in self.added])

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


def _flat(term: Scheme) -> tuple[Scheme, ...]:
    """Return the terms of a sum, or the term itself.

    Raises:
        SchemeError: it cannot be a term.
    """
    if isinstance(term, Sum):
        return term.terms
    if term.table_part is not None:
        raise SchemeError(
            f"sum: {term} is not inside attention, and all terms of a sum are. Add a table by +: Learned() + Rope()."
        )
    if not isinstance(term, Native) and not term.only_inside:
        raise SchemeError(f"sum: {term} combines schemes by layer or by weight; make it of sums, not a sum of it.")
    if term.kind == "none" and not term.acts_inside:
        raise SchemeError(f"sum: {term} does nothing, so it adds nothing: leave it out.")
    return (term,)


def _refuse_two_rotations(turning: list[str]) -> None:
    """Refuse more than one of what rotates queries and keys."""
    if len(turning) > 1:
        raise SchemeError(
            f"sum: {' and '.join(turning)} each rotate queries and keys, which are rotated once: their angles do not "
            "add up to a scheme. Give one of them; biases and query scales can be added to it."
        )


def _refuse_together(scheme: Sum, geometry: Geometry) -> None:
    """Refuse terms of a resolved sum that cannot be at work together."""
    mechanisms = [(term, term.mechanism(geometry)) for term in scheme.added]
    turning = [str(term) for term, mechanism in mechanisms if mechanism.rotates or mechanism.splits]
    if scheme.native is not None:
        turning.insert(0, f"native (rope, theta {geometry.base:g})")
    _refuse_two_rotations(turning)
    splitting = next((term for term, mechanism in mechanisms if mechanism.splits), None)
    biased = next((term for term, mechanism in mechanisms if mechanism.biases), None)
    if splitting is not None and biased is not None:
        raise SchemeError(
            f"{scheme.name}: {splitting.name} computes the scores region by region, which takes no bias, so "
            f"{biased.name} cannot be added. What works: a query scale (ssmax), or {biased.name} with a scheme that "
            "rotates once (rope, yarn)."
        )
    seeing = [term for term in scheme.terms if term.kind != "none"]
    if not seeing:
        raise SchemeError(
            f"{scheme.name}: {' and '.join(map(str, scheme.terms))} only scale queries, so there would be no "
            "positions; add native() (on the command line native), a rotation or a bias. For no positions and a scale: "
            "nope with logit_scale."
        )


class SumMechanism(Mechanism):
    """The terms of a sum at work: one rotates or splits, the biases are added, the scales multiplied."""

    def __init__(self, terms: list[Mechanism]) -> None:
        super().__init__()
        self.terms = nn.ModuleList(terms)
        self._turning = next((i for i, term in enumerate(terms) if term.rotates or term.splits), None)
        if self._turning is not None:
            turning = terms[self._turning]
            self.rotates, self.splits, self.head_dim = turning.rotates, turning.splits, turning.head_dim
            self.stores_rotated_keys, self.regions = turning.stores_rotated_keys, turning.regions
            self.keys_per_token, self.turns_on = turning.keys_per_token, turning.turns_on
        self._biased = tuple(i for i, term in enumerate(terms) if term.biases)
        self._scaled = tuple(i for i, term in enumerate(terms) if term.scales)
        self.biases, self.scales = bool(self._biased), bool(self._scaled)
        biased = [terms[i] for i in self._biased]
        self.distance_only = self.biases and all(term.distance_only for term in biased)
        self.piecewise = len(biased) == 1 and biased[0].piecewise
        slopes = [term.slopes for term in biased if term.slopes is not None]
        self.slopes = torch.stack(slopes).sum(dim=0) if slopes and len(slopes) == len(biased) else None

    @property
    def turning(self) -> Mechanism:
        """The term that rotates or splits."""
        assert self._turning is not None, "no term of this sum rotates"
        return self._term(self._turning)

    def _term(self, index: int) -> Mechanism:
        term = self.terms[index]
        assert isinstance(term, Mechanism)
        return term

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
        return _added([self._term(i).bias(query_positions, key_positions) for i in self._biased])

    def distance_bias(self, distances: Tensor) -> Tensor:
        return _added([self._term(i).distance_bias(distances) for i in self._biased])

    def piecewise_bias(self, distances: Tensor, query_positions: Tensor) -> PiecewiseBias:
        return self._term(self._biased[0]).piecewise_bias(distances, query_positions)

    def scale(self, query_positions: Tensor) -> Tensor:
        first, *others = (by_head(self._term(i).scale(query_positions)) for i in self._scaled)
        for other in others:
            first = first * other
        return first


def _added(biases: list[Tensor]) -> Tensor:
    first, *others = biases
    return sum(others, start=first)
