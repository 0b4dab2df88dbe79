"""Base of the schemes that add a table row to each token's embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import Kind, Scheme, Traits


@dataclass(frozen=True)
class AnyTable(Scheme):
    """A scheme that defines a table, of positions or of patches."""

    kind: ClassVar[Kind] = "table"
    trainable: ClassVar[bool] = True
    """Whether the rows are parameters that training changes; otherwise they are frozen."""

    @property
    def table_part(self) -> Self:
        return self

    def with_table(self, table: Any) -> Any:
        return table


@dataclass(frozen=True)
class TableScheme(AnyTable):
    """A scheme that defines the position table; stock models express all of them natively."""

    @property
    def traits(self) -> Traits:
        return Traits(relative=False, unbounded=False, shardable=True)

    def rows(self, geometry: Geometry, max_length: int | None) -> int:
        """Return how many positions the new table has."""
        return geometry.original_length if max_length is None else max_length

    def fit(self, old: Tensor, rows: int, geometry: Geometry) -> Self:
        """Return a copy with every parameter that depends on the weights of the old table filled in.

        Args:
            old: the table it replaces, [P, E], without the family's offset rows.
            rows: positions of the new table.
            geometry: of the model.
        """
        return self

    def table(self, old: Tensor, rows: int, geometry: Geometry) -> Tensor:
        """Return the new table of a fitted scheme, [rows, E], on the CPU, float32 or wider.

        Args:
            old: the table it replaces, [P, E], without the family's offset rows.
            rows: positions of the new table.
            geometry: of the model.
        """
        raise NotImplementedError

    @property
    def exact(self) -> bool:
        """Whether the parameters alone reproduce the rows exactly; otherwise `expected` gives them up to rounding."""
        return True

    def expected(self, held: Tensor, geometry: Geometry) -> Tensor:
        """Return the rows that a frozen table must have, [P, E], float32, given its current rows `held`."""
        return self.table(held, len(held), geometry)
