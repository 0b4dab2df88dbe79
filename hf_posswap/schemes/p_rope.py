"""Pairs that turn more slowly or not at all, the others at RoPE's own frequencies: p-RoPE and CoPE.

p-RoPE: Barbero et al. 2024, https://arxiv.org/abs/2410.06205, section 6.1; the other selections are those of MHA2MLA,
Ji et al. 2025, https://arxiv.org/abs/2502.14837, section 3.1. CoPE: Li et al. 2026, https://arxiv.org/abs/2602.05258;
the weights as in its code (https://github.com/hrlics/CoPE).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import CosSin, default_inv_freq
from hf_posswap.schemes.base import SCHEMES, Scheme, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.rope import OwnRotary, RotaryMechanism, RotaryScheme

BEST_P = 0.75
"""The share that was the paper's best."""
_MOST_PAIRS = 2**20


@SCHEMES.register("p_rope")
@dataclass(frozen=True, kw_only=True)
class PRope(RotaryScheme):
    """p-RoPE: theta_i = base^(-2i/R) for floor(p R/2) of the R/2 pairs, 0 for the others: they carry no position.

    Unlike `partial`, which narrows the rotation and spreads all frequencies over the narrower width, the pairs that
    turn keep the frequencies of the full width.

    Attributes:
        p: share of the pairs that turn, in (0, 1]; None: 0.75, the paper's best.
        select: with n = R/2 pairs and k that turn, "first": the k fastest (the paper); "last": the k slowest;
            "uniform": the pairs floor(j n/k), j < k. Or a list of the pairs that turn, instead of p; or one such list
            for each key head, which its query heads share. `hf_posswap.select_pairs` makes lists by 2-norm.

    Example:
        >>> from hf_posswap.geometry import Geometry
        >>> shape = Geometry(8, 1, 1, head_dim=8, num_layers=1, original_length=16, causal=True)
        >>> PRope(p=0.5).resolve(shape, None).angles(shape).inv_freq
        tensor([1.0000, 0.1000, 0.0000, 0.0000])
        >>> PRope(select=[0, 3]).resolve(shape, None).angles(shape).inv_freq
        tensor([1.0000, 0.0000, 0.0000, 0.0010])
    """

    __repr__ = Scheme.short_repr

    name: ClassVar[str] = "p_rope"
    summary: ClassVar[str] = "p-RoPE: a share of the frequencies turns, the others carry no position"
    source: ClassVar[str] = "https://arxiv.org/abs/2410.06205"

    p: float | None = None
    select: Literal["first", "last", "uniform"] | tuple[int, ...] | tuple[tuple[int, ...], ...] = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.select, str):
            checks.choice(self.name, "select", self.select, ("first", "last", "uniform"))
        else:
            object.__setattr__(self, "select", _checked_lists(self.name, self.select))
        if self.p is None:
            return
        object.__setattr__(self, "p", checks.number(self.name, "p", self.p, above=0.0, maximum=1.0))
        if not isinstance(self.select, str):
            raise SchemeError(
                f"{self.name}: a list in select already sets how many pairs turn, got p={self.p:g} as well; give "
                "one of the two."
            )

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, training_free=False)

    @property
    def by_head(self) -> bool:
        """Whether each key head has its own pairs."""
        return not isinstance(self.select, str) and isinstance(self.select[0], tuple)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if self.partial is not None and self.p is None and isinstance(self.select, str):
            raise SchemeError(
                f"{self.name}: partial={self.partial:g} narrows the rotation and spreads its frequencies over the "
                "narrower width, so that every pair turns otherwise than before; the share of the pairs that turn is "
                f"p. Give p={self.partial:g} in its place, or p as well if you mean both."
            )
        pairs = resolved.rotary_dim(geometry) // 2
        if isinstance(self.select, str):
            resolved = dataclasses.replace(resolved, p=BEST_P if self.p is None else self.p)
        elif self.by_head and len(self.select) != geometry.num_kv_heads:
            raise SchemeError(
                f"{self.name}: select has {len(self.select)} lists, and this model has {geometry.num_kv_heads} key "
                "heads; give one list a key head, or one list for all."
            )
        turning = resolved.turning(geometry)
        highest = max((pair for chosen in turning for pair in chosen), default=None)
        if highest is None:
            raise SchemeError(
                f"{self.name}: p={resolved.p:g} of this model's {pairs} rotary pairs is none; give a larger p, or use "
                "'nope'."
            )
        if highest >= pairs:
            raise SchemeError(
                f"{self.name}: select names pair {highest}, and this model has {pairs} rotary pairs, counted from 0."
            )
        return resolved

    def turning(self, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
        """Return the pairs that turn, of a resolved scheme: one list for each key head, or one for all."""
        if not isinstance(self.select, str):
            return self.select if self.by_head else (self.select,)  # type: ignore[return-value]
        pairs = self.rotary_dim(geometry) // 2
        kept = math.floor(self.filled("p") * pairs + 1e-9)  # 0.58 * 50 is 28.999999999999996 in floats
        if self.select == "uniform":
            return (tuple(j * pairs // kept for j in range(kept)),)
        return (tuple(range(kept)) if self.select == "first" else tuple(range(pairs - kept, pairs)),)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return theta_i as any rotary scheme does, [R/2]; where each key head has its own pairs, [G, 1, R/2]."""
        plain = default_inv_freq(self.filled("base"), self.rotary_dim(geometry), dtype)  # [R/2]
        turning = self.turning(geometry)
        inv_freq = plain.new_zeros(len(turning), len(plain))  # [G or 1, R/2]
        for row, chosen in zip(inv_freq, turning, strict=True):
            row[list(chosen)] = plain[list(chosen)]
        return inv_freq[:, None] if self.by_head else inv_freq[0]

    def mechanism(self, geometry: Geometry) -> RotaryMechanism:
        return HeadwiseMechanism(self, geometry) if self.by_head else super().mechanism(geometry)

    def native_rope(self, geometry: Geometry) -> dict[str, object] | None:
        (chosen, *others) = self.turning(geometry)
        if others or self.by_head or chosen != tuple(range(len(chosen))):
            return None
        width, kept = self.rotary_dim(geometry), len(chosen)
        # stock rounds p R / 2 down in floats; where that loses a pair, use the middle of the right interval
        share = self.p if self.p is not None and int(self.p * width // 2) == kept else min(1.0, (2 * kept + 1) / width)
        return {"rope_type": "proportional", "rope_theta": self.filled("base"), "partial_rotary_factor": share}


@SCHEMES.register("cope")
@dataclass(frozen=True, kw_only=True)
class Cope(OwnRotary):
    """CoPE, clipped RoPE: the angles of the last n pairs, k = 0..n-1, times (1 + cos(pi k/(n - 1)))/2: from 1 to 0.

    The slowest pairs do not complete a turn within the length of training, so that a longer text meets angles that they
    have never had. Cut off at once (that is `p_rope`), they leave ripples over all distances; faded out, they do not.
    The angles are the model's own, its scaling included, unless `base` is given: the paper trains with a larger base.
    It has nothing to do with contextual position encoding (arXiv 2405.18719), which is called CoPE too.

    The last pair keeps 1e-20 of its angle instead of none, so that a stock config can hold it in a list of divisors:
    its sine is lost in the rounding of float32 at every position below 10^12.

    Attributes:
        faded: n, of the pairs that turn, at least 2; None takes 5/16 of these: the paper's 20 of the 64 of Llama 3 8B.

    Example:
        >>> from hf_posswap.geometry import Geometry
        >>> shape = Geometry(8, 1, 1, head_dim=8, num_layers=1, original_length=16, causal=True)
        >>> Cope(faded=3).resolve(shape, None).angles(shape).inv_freq.round(decimals=4)
        tensor([1.0000, 0.1000, 0.0050, 0.0000])
    """

    name: ClassVar[str] = "cope"
    summary: ClassVar[str] = "CoPE: clipped RoPE, whose slowest pairs fade out"
    source: ClassVar[str] = "https://arxiv.org/abs/2602.05258"

    faded: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.faded is not None:
            checks.whole(self.name, "faded", self.faded, minimum=2, maximum=_MOST_PAIRS)

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, training_free=False)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        turning = int((super(Cope, resolved).theta(geometry, None, torch.float64) > 0).sum())
        faded = max(2, round(turning * 5 / 16)) if self.faded is None else self.faded
        if faded > turning:
            raise SchemeError(f"{self.name}: faded={faded}, and {turning} rotary pairs of this model turn; give fewer.")
        return dataclasses.replace(resolved, faded=faded)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        plain = super().theta(geometry, length, dtype).clone()
        faded = self.filled("faded")
        weights = (1 + torch.linspace(0.0, math.pi, faded, dtype=torch.float64, device="cpu").cos()) / 2
        slowest = plain.nonzero().flatten()[-faded:]
        plain[slowest] *= weights.clamp(min=LEAST_WEIGHT).to(dtype)
        return plain

    def native_rope(self, geometry: Geometry) -> dict[str, object] | None:
        return self.native_list(geometry)


LEAST_WEIGHT = 1e-20
"""Of an angle that is to be none."""


class HeadwiseMechanism(RotaryMechanism):
    """Rotates each key head, and the query heads that attend to it, by its own angles."""

    def rotate_query(self, query: Tensor, prepared: CosSin) -> Tensor:
        share = query.shape[1] // prepared.cos.shape[1]  # query heads of one key head, H / G
        cos, sin = (table.repeat_interleave(share, dim=1) for table in prepared)  # [B, H, Q, R/2]
        return super().rotate_query(query, CosSin(cos, sin))


def _checked_lists(owner: str, select: Any) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
    """Return `select` as a sorted tuple of pairs, or as one such tuple a head, some of which may be empty."""
    nested = isinstance(select, Sequence) and any(not isinstance(item, int) for item in select)
    lists = list(select) if nested else [select]
    for chosen in lists:
        if isinstance(chosen, str) or not isinstance(chosen, Sequence):
            raise SchemeError(
                f"{owner}: select must be one of 'first', 'last', 'uniform', a list of pairs, or one such list a key "
                f"head, got {select!r}."
            )
        for pair in chosen:
            checks.whole(owner, "a pair in select", pair, minimum=0, maximum=_MOST_PAIRS)
        if len(set(chosen)) < len(chosen):
            raise SchemeError(f"{owner}: select names a pair twice: {chosen!r}.")
    if not any(lists):
        raise SchemeError(f"{owner}: select is empty, so that no pair would turn; use 'nope'.")
    rising = tuple(tuple(sorted(chosen)) for chosen in lists)
    return rising if nested else rising[0]
