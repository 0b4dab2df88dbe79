"""Sums of schemes: a rotation, biases, query scales in the same attention; what the model itself has; a position table.

Scalable-Softmax, a query scale to add: Nakanishi 2025, https://arxiv.org/abs/2501.19399.
"""

from __future__ import annotations

import dataclasses
import math
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
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.piece import Keys, Piece
from hf_posswap.schemes.common.table import TableScheme
from hf_posswap.schemes.layered import combined, inside
from hf_posswap.schemes.learned import Learned
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
            self.splits_queries = turning.splits_queries
        self._biased = tuple(i for i, term in enumerate(terms) if term.biases)
        self._scaled = tuple(i for i, term in enumerate(terms) if term.scales)
        self.biases, self.scales = bool(self._biased), bool(self._scaled)
        biased = [terms[i] for i in self._biased]
        self.distance_only = self.biases and all(term.distance_only for term in biased)
        self.piecewise = len(biased) == 1 and biased[0].piecewise
        slopes = [slopes for term in biased if (slopes := term.slopes) is not None]
        linear = self.biases and len(slopes) == len(biased)
        self.learns_slopes = linear and any(term.learns_slopes for term in biased)
        self.constant_slopes = torch.stack(slopes).sum(dim=0) if linear and not self.learns_slopes else None

    @property
    def turning(self) -> Mechanism:
        """The term that rotates or splits."""
        assert self._turning is not None, "no term of this sum rotates"
        return self._term(self._turning)

    @property
    def slopes(self) -> Tensor | None:  # type: ignore[override]
        """The sums of those of the biases; None: one of them has another form, or there is none."""
        if not self.learns_slopes:
            return self.constant_slopes
        added = [slopes for i in self._biased if (slopes := self._term(i).slopes) is not None]
        device = max((slopes.device for slopes in added), key=lambda device: device.type != "cpu")
        return torch.stack([slopes.to(device) for slopes in added]).sum(dim=0)

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


@SCHEMES.register("together")
@dataclass(frozen=True)
class Together(Scheme):
    """A table that is added to the embeddings, and a scheme inside attention: `Learned() + Rope()`.

    Attributes:
        table: the table scheme: learned, sinusoidal.
        inside: the scheme inside attention: a rotary or a bias scheme.

    Example:
        >>> str(Learned() + Rope(base=500.0))
        "together(table=learned(extend='tile', alpha=0.4, seed=0), inside=rope(base=500.0))"
    """

    name: ClassVar[str] = "together"
    summary: ClassVar[str] = "a position table and a scheme inside attention, both at work"
    source: ClassVar[str] = "https://arxiv.org/abs/2104.09864"
    kind: ClassVar[Kind] = "mixed"

    table: Scheme = Learned()
    inside: Scheme = Rope()

    def __post_init__(self) -> None:
        table = make_scheme(self.table)
        if not isinstance(table, TableScheme):
            raise SchemeError(f"{self.name}: table must be a table scheme (learned, sinusoidal), got {table}.")
        within = make_scheme(self.inside)
        if within.keeps_native:
            raise SchemeError(
                f"{self.name}: {table.name} would replace a table that native keeps: give {table.name} alone, or add "
                "to native what acts inside attention (alibi, rope, ssmax)."
            )
        within = inside(self.name, "inside", within, term=True)
        if not within.acts_inside:
            raise SchemeError(f"{self.name}: a table with {within} is only the table: use {table.name}.")
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "inside", within)

    @property
    def table_part(self) -> TableScheme:
        assert isinstance(self.table, TableScheme)
        return self.table

    def with_table(self, table: Scheme) -> Self:
        return dataclasses.replace(self, table=table)

    @property
    def traits(self) -> Traits:
        return combined((self.table, self.inside))

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        length = max_length or self.inside.resolve(geometry, None).reach(geometry)
        return dataclasses.replace(
            self, table=self.table.resolve(geometry, length), inside=self.inside.resolve(geometry, max_length)
        )

    def reach(self, geometry: Geometry) -> int | None:
        return self.inside.reach(geometry)

    def notes(self) -> tuple[str, ...]:
        return (*self.table.notes(), *self.inside.notes())

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return self.inside.mechanism(geometry)


@TERMS.register("ssmax")
@dataclass(frozen=True)
class SSMax(Scheme):
    """Scalable-Softmax: the scores of a query that sees n keys are multiplied by s_h ln n, s_h learned by head.

    A softmax over more keys is flatter; this keeps it as sharp at every length. It is not a position mechanism: add it
    to one, as in `native() + SSMax()` or `Rope() + SSMax()`. n is position + 1, and in a model whose layers all have a
    sliding window at most that window; where only some have one, n is position + 1 in all of them.

    Attributes:
        s: s_h at the start, for every head; None takes 1 / mean(ln n) over the original window, with which the scores
            of the trained lengths keep their mean scale.

    Example:
        >>> geometry = Geometry(8, 2, 2, 4, 1, original_length=64, causal=True)
        >>> mechanism = SSMax(s=0.5).mechanism(geometry)
        >>> mechanism.scale(torch.tensor([[0, 7, 63]])).shape  # [1, H, Q]
        torch.Size([1, 2, 3])
    """

    name: ClassVar[str] = "ssmax"
    summary: ClassVar[str] = "Scalable-Softmax: learned query scale s ln n; to add to another scheme"
    source: ClassVar[str] = "https://arxiv.org/abs/2501.19399"
    kind: ClassVar[Kind] = "none"
    standalone: ClassVar[bool] = False

    s: float | None = None

    def __post_init__(self) -> None:
        if self.s is not None:
            object.__setattr__(self, "s", checks.number(self.name, "s", self.s, above=0.0, maximum=1e6))

    @property
    def acts_inside(self) -> bool:
        return True

    @property
    def traits(self) -> Traits:
        return Traits(causal_only=True, relative=False)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        length = geometry.original_length
        seen = min(length, geometry.sliding_window or length)
        # the mean of ln 1 to ln L is ln(L!) / L, and from a sliding window on ln n stands; of one token it is 0
        mean = (math.lgamma(seen + 1) + (length - seen) * math.log(seen)) / length
        return resolved if self.s is not None else dataclasses.replace(resolved, s=1 / mean if mean else 1.0)

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return SSMaxMechanism(self.filled("s"), geometry.num_heads, geometry.sliding_window)


class SSMaxMechanism(Mechanism):
    """Multiplies each query by s_h ln n."""

    scales = True

    def __init__(self, s: float, heads: int, window: int | None) -> None:
        super().__init__()
        self.window = math.inf if window is None else window
        self.s = nn.Parameter(torch.full((heads,), s, dtype=torch.float32))  # [H]

    def scale(self, query_positions: Tensor) -> Tensor:
        # the first token sees one key: any scale serves it; padding may have positions below 0
        seen = (query_positions.float() + 1).clamp(1.0, self.window)  # [B or 1, Q]
        return self.s.float()[:, None] * seen.log()[:, None]  # [B or 1, H, Q]
