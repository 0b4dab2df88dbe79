"""Rotary schemes whose angles follow the length of the text: of the whole, of each query's past, or of a pinned one.

Stock transformers takes the angles of the current length for all tokens. Keys and values of deeper layers were then
computed under other angles than a full forward would use, so decoding with a cache and one full forward differ past
the original length. There are two fixes: every query takes the angles of its length so far, which depends only on
its position; or one length is fixed for the whole sequence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.merge import OfQueries
from hf_posswap.rope_math import CosSin
from hf_posswap.schemes.base import Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.piece import Keys, Piece, side_by_side
from hf_posswap.schemes.rope import RotaryMechanism
from hf_posswap.schemes.scaled import ScaledRotary


@dataclass(frozen=True)
class DynamicRope(ScaledRotary):
    """The base of rotary schemes whose angles follow the length (transformers' dynamic rope types).

    Attributes:
        follow: "sequence": all tokens take the angles of the current length, as stock transformers does; "query": each
            query, and every key for it, takes those of the query's own length, so that full, chunked and stepwise
            forwards agree. Keys are then cached raw, or, if there are few distinct lengths, rotated for each of them.
        pin: one length, in tokens, whose angles hold for every sequence, however long.
    """

    lengths: ClassVar[int | None] = None
    """How many distinct lengths follow="query" uses; None: unboundedly many."""

    follow: Literal["sequence", "query"] = "sequence"
    pin: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice(self.name, "follow", self.follow, ("sequence", "query"))
        if self.pin is not None:
            checks.length(self.name, "pin", self.pin)
            if self.follow == "query":
                raise SchemeError(
                    f"{self.name}: follow='query' chooses angles for each token, pin={self.pin} one for all; "
                    "give one of the two."
                )

    @property
    def length_dependent(self) -> bool:
        return self.pin is None

    @property
    def traits(self) -> Traits:
        by_query = self.follow == "query"
        consistent = by_query or self.pin is not None
        return dataclasses.replace(
            super().traits,
            prefix_consistent=consistent,
            causal_only=by_query,
            relative=not by_query,
            shardable=self.pin is not None,
        )

    def notes(self) -> tuple[str, ...]:
        if self.pin is not None:
            return (f"the angles are those of {self.pin} tokens for every sequence, however long",)
        if self.follow == "query":
            kept = "raw" if self.lengths is None else f"rotated for each of {self.lengths} lengths"
            return (f"each token takes the angles of its length {self.rounding()}; keys are cached {kept}",)
        return (
            "the angles follow the current length: past the original one, decoding with a cache and a full forward "
            "differ; follow='query' or pin= make them agree",
        )

    def rounding(self) -> str:
        """Describe how follow="query" rounds lengths."""
        raise NotImplementedError

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.pin is not None:
            length = torch.tensor([self.pin], device="cpu" if length is None else length.device)
        return self.theta_at(geometry, length, dtype)

    def theta_at(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return `theta` of the given lengths, ignoring `pin`."""
        raise NotImplementedError

    def bucket(self, positions: Tensor) -> Tensor:
        """Return the index, from 0, of the distinct length of a query at `positions`."""
        raise NotImplementedError

    def first_of(self, bucket: int) -> int | None:
        """Return the first position of the queries of `bucket`, at least 1; None: there is no such bucket."""
        raise NotImplementedError

    def bucket_length(self, bucket: int) -> int:
        """Return the length, in tokens, whose angles the queries of `bucket` take."""
        raise NotImplementedError

    def mechanism(self, geometry: Geometry) -> RotaryMechanism:
        return ByQueryMechanism(self, geometry) if self.follow == "query" else RotaryMechanism(self, geometry)


class ByQueryMechanism(RotaryMechanism):
    """Splits attention by the lengths of its queries."""

    splits = True
    splits_queries = True
    rotates = False
    scheme: DynamicRope

    def __init__(self, scheme: DynamicRope, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        self.keys_per_token = scheme.lengths or 1
        self.stores_rotated_keys = self.keys_per_token > 1

    def prepare(self, positions: Tensor, length: Tensor) -> Any:
        return tuple(self._turn(bucket, positions) for bucket in range(self.keys_per_token))

    def rotate_query(self, query: Tensor, prepared: Any) -> Tensor:
        return query  # each piece rotates it itself

    def rotate_key(self, key: Tensor, prepared: Any) -> Tensor:
        return side_by_side(key, prepared, self.layout)

    def pieces(self, query_positions: Tensor, key_positions: Tensor, *, keys: Keys = "raw") -> tuple[Piece, ...]:
        copied = keys == "copies"
        buckets = self.scheme.bucket(query_positions)
        return tuple(
            Piece(
                query=self._turn(bucket, query_positions),
                key=None if copied else self._turn(bucket, key_positions),
                layout=self.layout,
                pairs=OfQueries(self.scheme.first_of(bucket) if bucket else None, self.scheme.first_of(bucket + 1)),
                copy=bucket if copied else 0,
                keys_per_token=self.keys_per_token if copied else 1,
            )
            for bucket in range(int(buckets.min()), int(buckets.max()) + 1)
        )

    def _turn(self, bucket: int, positions: Tensor) -> CosSin:
        length = torch.tensor([self.scheme.bucket_length(bucket)], device=positions.device)
        return self.scheme.turns(positions, self.scheme.angles(self.geometry, length), self.geometry)
