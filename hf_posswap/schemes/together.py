"""A position table combined with a scheme inside attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES, Kind, Scheme, Traits, make_scheme
from hf_posswap.schemes.common.table import TableScheme
from hf_posswap.schemes.layered import combined, inside
from hf_posswap.schemes.learned import Learned
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.rope import Rope


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

    def with_table(self, table: Any) -> Self:
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
