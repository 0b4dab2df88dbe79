"""Learned biases of distance: KERPLE, FIRE, T5's.

KERPLE, a penalty that grows with the logarithm, or a power, of distance: Chi et al. 2022,
https://arxiv.org/abs/2205.09921, equations 6 and 7. FIRE, a small network maps distance, relative to the query's own
position, to a bias: Li et al. 2023, https://arxiv.org/abs/2310.04418, equation 5 and appendix E. T5's, one number for
each bucket of distances and head: Raffel et al. 2019, https://arxiv.org/abs/1910.10683, section 2.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_tensors import transforms_active
from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.piecewise_bias import PiecewiseBias
from hf_posswap.schemes.base import SCHEMES, Kind, Scheme, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.bias import (
    DistanceMechanism,
    FittedBias,
    LinearBias,
    distances,
    generator,
    inverse_softplus,
    parameter,
    rounded,
    uniform,
)
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.devices import without_autocast

SMALLEST = 0.01
"""Lower bound of the initial r1 and r2, as the authors' code clamps them."""
HIGHEST_POWER = 2.0
"""r2 of the power variant stays below it: up to there the kernel is conditionally positive definite."""
LEAST_FITTED = 1e-4
"""Lower bound of a fitted r1: near 0 the gradient of its softplus vanishes, and training could not raise it."""


@SCHEMES.register("kerple")
@dataclass(frozen=True)
class Kerple(FittedBias):
    """KERPLE: score - r1 ln(1 + r2 |i - j|), or score - r1 |i - j|^r2; r1, r2 > 0 learned for each head.

    They are initialized at random, as in the authors' code: "log" with r1 in (0, 2), r2 in (0, 1); "power" with r1 in
    (0, 1), r2 in (0, 2). The authors clamp them after each step; here r = softplus(raw), and 2 sigmoid(raw) for the
    power, so that they cannot leave their ranges. In an encoder the penalty is the same to both sides.

    Attributes:
        variant: "log" (the paper's best) or "power".
        seed: of the initial r1 and r2.
        r1: initial r1 of each head instead, with r2; None: at random. `hf_posswap.fit_bias` finds those closest to a
            model's own positions, for each layer.
        r2: likewise, below 2 for "power".

    Example:
        >>> Kerple().variant
        'log'
    """

    __repr__ = Scheme.short_repr

    name: ClassVar[str] = "kerple"
    summary: ClassVar[str] = "a learned penalty on the logarithm, or a power, of distance"
    source: ClassVar[str] = "https://arxiv.org/abs/2205.09921"
    kind: ClassVar[Kind] = "bias"
    fitted_fields: ClassVar[tuple[str, ...]] = ("r1", "r2")

    variant: Literal["log", "power"] = "log"
    seed: int = 0
    r1: tuple[float, ...] | None = None
    r2: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        checks.choice(self.name, "variant", self.variant, ("log", "power"))
        checks.whole(self.name, "seed", self.seed, minimum=0, maximum=checks.LARGEST_SEED)
        for name in self.fitted_fields:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.factors(self.name, name, getattr(self, name), each="head"))
        if (self.r1 is None) != (self.r2 is None):
            raise SchemeError(f"{self.name}: give r1 and r2 together, got r1={self.r1} and r2={self.r2}.")
        if self.variant == "power" and max(self.r2 or (0.0,)) >= HIGHEST_POWER:
            raise SchemeError(f"{self.name}: r2 must be below {HIGHEST_POWER:g} where it is a power, got {self.r2}.")

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        for name in self.fitted_fields:
            if len(getattr(self, name) or range(geometry.num_heads)) != geometry.num_heads:
                raise SchemeError(
                    f"{self.name}: {name} has {len(getattr(self, name))} numbers, and this model has "
                    f"{geometry.num_heads} heads; give one each."
                )
        return self

    def fitted(self, target: Tensor, weights: Tensor, distances: Tensor, geometry: Geometry) -> Self:
        rates, powers = torch.logspace(-4, 3, 1401, device="cpu"), torch.linspace(0.002, 1.998, 999, device="cpu")
        r2 = (rates if self.variant == "log" else powers).double()
        grown = _grown(self.variant, distances.abs().double(), r2[:, None])  # [grid, N]
        pairs = []
        for wanted, weight in zip(target, weights / weights.sum(dim=1, keepdim=True), strict=True):
            centred = grown - (grown @ weight)[:, None]
            fall = (wanted @ weight) - wanted  # [N]
            steepness = (centred * fall) @ weight / (centred.square() @ weight)  # [grid]
            r1 = steepness.nan_to_num().clamp(min=LEAST_FITTED)
            best = int(((r1[:, None] * centred - fall).square() @ weight).argmin())
            pairs.append(torch.stack((r1[best], r2[best])))
        first, second = torch.stack(pairs, dim=1)  # [H], [H]
        return dataclasses.replace(self, r1=tuple(rounded(first)), r2=tuple(rounded(second)))

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return KerpleMechanism(self, geometry.num_heads)


class KerpleMechanism(DistanceMechanism):
    """Subtracts the penalty from the scores.

    Attributes:
        raw_r1: learned, [H]; r1 = softplus(raw_r1).
        raw_r2: learned, [H]; r2 = softplus(raw_r2), or 2 sigmoid(raw_r2) where it is a power.
    """

    def __init__(self, scheme: Kerple, heads: int) -> None:
        super().__init__()
        self.variant = scheme.variant
        source = generator(scheme.seed)
        first, second = (2.0, 1.0) if scheme.variant == "log" else (1.0, HIGHEST_POWER)
        r1 = uniform(SMALLEST, first, (heads,), source)
        r2 = uniform(SMALLEST, second, (heads,), source)
        if scheme.r1 is not None and scheme.r2 is not None:
            r1, r2 = (torch.tensor(given, dtype=torch.float32, device="cpu") for given in (scheme.r1, scheme.r2))
        self.raw_r1 = parameter(inverse_softplus(r1))
        inverse_power = (r2 / HIGHEST_POWER).logit(eps=1e-3)
        self.raw_r2 = parameter(inverse_softplus(r2) if scheme.variant == "log" else inverse_power)

    def r1(self) -> Tensor:
        """Return the size of the penalty, [H], float32, > 0."""
        return nn.functional.softplus(self.raw_r1.float())

    def r2(self) -> Tensor:
        """Return the rate inside the logarithm, > 0, or the power, in (0, 2); [H], float32."""
        raw = self.raw_r2.float()
        return nn.functional.softplus(raw) if self.variant == "log" else HIGHEST_POWER * raw.sigmoid()

    def distance_bias(self, distances: Tensor) -> Tensor:
        length = distances.abs().float()  # [N]
        r1, r2 = self.r1()[:, None], self.r2()[:, None]  # [H, 1]
        return -r1 * _grown(self.variant, length, r2)

    def extra_repr(self) -> str:
        return f"variant={self.variant!r}, heads={len(self.raw_r1)}"


def _grown(variant: str, length: Tensor, r2: Tensor) -> Tensor:
    """Return ln(1 + r2 d), or d^r2, of distances [N] and r2 [..., 1], [..., N]."""
    return (r2 * length).log1p() if variant == "log" else length.pow(r2)


PAPER_THRESHOLD = 512.0
"""L of the paper, in tokens."""
PAPER_SHARE = 0.25
"""Of the length that the paper trains on, 2048 tokens."""
EPSILON = 1e-6
IN_CACHE = 2**12
"""Query-key pairs, over all rows of a batch, that go through the network at a time on a CPU: their hidden layer fits
into the cache."""


@SCHEMES.register("fire")
@dataclass(frozen=True)
class Fire(Scheme):
    """FIRE: score + f_h(psi(i - j) / psi(max(i, |M| L))), with psi(x) = ln(1 + |c x|).

    f is a network 1 -> width -> ReLU -> H; it, c and M are learned and shared by the layers: the paper's variant
    FIRE-S. The paper's FIRE has its own f, c and M in each layer. Distances are measured against the query's position
    i, so all of them lie in [0, 1] at any length; below the threshold |M| L only differences of positions matter, above
    it i itself does. M starts at 1, f is initialized as torch's linear layers are.

    Attributes:
        width: of the network.
        c: its initial value; > 0.
        threshold: L, in tokens; None takes the paper's 512, or a quarter of the model's original length, as 512 is of
            the paper's 2048, where that is less.
        seed: of the initial weights of f.

    Example:
        >>> Fire().width, Fire().c
        (32, 0.1)
        >>> Fire().traits.relative
        False
    """

    name: ClassVar[str] = "fire"
    summary: ClassVar[str] = "a small learned network of distance relative to the query's position"
    source: ClassVar[str] = "https://arxiv.org/abs/2310.04418"
    kind: ClassVar[Kind] = "bias"

    width: int = 32
    c: float = 0.1
    threshold: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.whole(self.name, "width", self.width, minimum=1, maximum=4096)
        object.__setattr__(self, "c", checks.number(self.name, "c", self.c, above=0.0, maximum=1e6))
        if self.threshold is not None:
            checked = checks.number(self.name, "threshold", self.threshold, above=0.0, maximum=1e9)
            object.__setattr__(self, "threshold", checked)
        checks.whole(self.name, "seed", self.seed, minimum=0, maximum=checks.LARGEST_SEED)

    @property
    def traits(self) -> Traits:
        return Traits(relative=False)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        if self.threshold is not None:
            return self
        return dataclasses.replace(self, threshold=min(PAPER_THRESHOLD, PAPER_SHARE * geometry.original_length))

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return FireMechanism(self, geometry.num_heads)


class FireMechanism(Mechanism):
    """Adds the network's bias to the scores.

    Attributes:
        c: learned, [1].
        multiplier: M, learned, [1].
        hidden_weight: learned, [W].
        hidden_bias: learned, [W].
        out_weight: learned, [H, W].
        out_bias: learned, [H].
    """

    biases = True
    piecewise = True

    def __init__(self, scheme: Fire, heads: int) -> None:
        super().__init__()
        self.threshold = scheme.filled("threshold")
        source, width = generator(scheme.seed), scheme.width
        self.hidden_width = width
        self.c = parameter(torch.tensor([scheme.c], dtype=torch.float32, device="cpu"))
        self.multiplier = parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
        # initialized like nn.Linear: uniform within 1 / sqrt(inputs). PEFT and quantizers would wrap nn.Linear itself
        self.hidden_weight = parameter(uniform(-1.0, 1.0, (width,), source))
        self.hidden_bias = parameter(uniform(-1.0, 1.0, (width,), source))
        bound = width**-0.5
        self.out_weight = parameter(uniform(-bound, bound, (heads, width), source))
        self.out_bias = parameter(uniform(-bound, bound, (heads,), source))

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        dtype = torch.promote_types(self.out_weight.dtype, torch.float32)  # float64 if the parameters are
        distance = distances(query_positions, key_positions).to(dtype)  # [B, Q, K]
        threshold = (self.multiplier.to(dtype) * self.threshold).abs()  # [1]
        reference = torch.maximum(query_positions.to(dtype), threshold)[:, :, None]  # [B, Q, 1]
        share = self._psi(distance) / (self._psi(reference) + EPSILON)  # [B, Q, K]
        with without_autocast(share):
            # f_h of `share`, [B, H, Q, K]
            flat = share.flatten(1)[:, None]  # [B, 1, Q K]
            if torch.is_grad_enabled() or torch.compiler.is_compiling() or transforms_active():
                return self._of(flat).unflatten(2, share.shape[1:])
            out = flat.new_empty(len(flat), len(self.out_bias), flat.shape[2])  # [B, H, Q K]
            pairs = max(1, IN_CACHE // len(flat)) if flat.device.type == "cpu" else max(1, flat.shape[2])
            for start in range(0, flat.shape[2], pairs):
                some = slice(start, start + pairs)
                out[..., some] = self._of(flat[..., some])
            return out.unflatten(2, share.shape[1:])

    def piecewise_bias(self, distances: Tensor, query_positions: Tensor) -> PiecewiseBias:
        weight, shift = self.hidden_weight.double(), self.hidden_bias.double()  # [W]
        outer, offset = self.out_weight.double(), self.out_bias.double()  # [H, W], [H]
        threshold = (self.multiplier.double() * self.threshold).abs()  # [1]
        line = self._psi(distances.double())
        factors = 1 / (self._psi(torch.maximum(query_positions.double(), threshold)) + EPSILON)
        largest = line.detach().amax() * factors.detach().amax()
        with torch.no_grad():
            knot = -shift / weight
            # at a share of 0 or more, a falling unit with its knot at 0 is off, as one with a knot below
            has_knot = (weight != 0) & (knot <= largest) & torch.where(weight < 0, knot > 0, knot >= 0)
            is_off = ~has_knot & (weight * (largest / 2) + shift <= 0)
            # a falling unit is a line plus a rising unit
            is_line = torch.where(has_knot, weight < 0, ~is_off)
        knots = -shift / torch.where(has_knot, weight, 1.0)
        bends = outer * torch.where(has_knot, weight.abs(), 0.0)
        order = torch.where(has_knot, knots.detach(), torch.inf).argsort()
        has_knot, knots, bends = has_knot[order], knots[order], bends[:, order]
        zero = torch.zeros_like(outer[:, :1])
        turns = torch.cat((zero, bends), dim=1).cumsum(dim=1)
        drops = torch.cat((zero, bends * torch.where(has_knot, knots, 0.0)), dim=1).cumsum(dim=1)
        line_slope = (outer * torch.where(is_line, weight, 0.0)).sum(dim=1)
        line_offset = offset + (outer * torch.where(is_line, shift, 0.0)).sum(dim=1)
        return PiecewiseBias(
            line, factors, torch.where(has_knot, knots, torch.inf), line_offset[:, None] - drops,
            line_slope[:, None] + turns, bends,
        )  # fmt: skip

    def _of(self, share: Tensor) -> Tensor:
        """Return f_h of `share` [B, 1, n], [B, H, n]."""
        dtype = share.dtype
        inner, outer = self.hidden_bias.to(dtype)[:, None], self.out_bias.to(dtype)[:, None]
        hidden = (self.hidden_weight.to(dtype)[:, None] * share).add_(inner).relu_()  # [B, W, n]
        # matmul takes another path, with other rounding, for frozen weights
        return torch.einsum("hw,bwn->bhn", self.out_weight.to(dtype), hidden) + outer

    def _psi(self, length: Tensor) -> Tensor:
        """Return ln(1 + |c length|)."""
        return (self.c.to(length.dtype) * length).abs().log1p()

    def extra_repr(self) -> str:
        heads, width = self.out_weight.shape
        return f"heads={heads}, width={width}, threshold={self.threshold:g}"


MOST_BUCKETS = 2**12
FARTHEST = 2**20
"""The largest max_distance, in tokens: each distance up to it has an entry in a list."""


def buckets(num_buckets: int, max_distance: int, *, causal: bool) -> Tensor:
    """Return the bucket of each distance query - key from -max_distance to max_distance, [2 max_distance + 1], int64.

    Distances of one side below n/2, n its number of buckets, have a bucket each; the others share
    n/2 + floor(n/2 * ln(2 distance / n) / ln(2 max_distance / n)), at most n - 1. A causal model has all buckets for
    the past; else the second half of them is for the keys that come after the query. The logarithm is float32, as in
    T5's training, so that a distance on the edge of two buckets falls into the same one.

    Example:
        >>> buckets(4, 8, causal=True).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3]
    """
    side = num_buckets if causal else num_buckets // 2
    exact = side // 2
    distance = torch.arange(max_distance + 1, device="cpu")
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    shared = (exact + (ratio * (side - exact)).long()).clamp(max=side - 1)
    past = torch.where(distance < exact, distance, shared)  # [max_distance + 1]
    future = torch.zeros_like(past) if causal else side + past
    return torch.cat((future[1:].flip(0), past))


def _rows(owner: str, given: Any, count: int) -> tuple[tuple[float, ...], ...]:
    """Return `given` as the rows of a table of `count` buckets.

    Raises:
        SchemeError: it is not such a table; the message says why.
    """
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    rows = [row for row in given if isinstance(row, Sequence) and not isinstance(row, str) and row] if listed else []
    if not rows or len(rows) != len(given) or len({len(row) for row in rows}) > 1:
        raise SchemeError(
            f"{owner}: start must be a list of lists, for each bucket a number for each head, got {given!r}."
        )
    if len(rows) != count:
        raise SchemeError(f"{owner}: start has {len(rows)} buckets, and num_buckets is {count}.")
    numbers = [
        [checks.number(owner, f"start[{i}][{h}]", item) for h, item in enumerate(row)] for i, row in enumerate(rows)
    ]
    return tuple(map(tuple, numbers))


@SCHEMES.register("t5")
@dataclass(frozen=True)
class T5Bias(LinearBias):
    """T5's bias: score + table[bucket(i - j), h], the table learned and shared by the layers.

    It is added to the scaled score q k / sqrt(D); T5 itself does not scale. With `init_std` 0 the swapped model starts
    without positions (nope): the bias has to be trained.

    Attributes:
        num_buckets: rows of the table, even in an encoder, where half are for each side.
        max_distance: distance, in tokens, from which all keys share the last bucket of their side.
        init_std: standard deviation of the normal distribution of the initial table; 0: it starts at zero.
        seed: of those numbers.
        start: the initial table instead: for each bucket a number for each head. `hf_posswap.fit_bias` finds the one
            closest to a model's own positions, for each layer.

    Example:
        >>> T5Bias().num_buckets, T5Bias().max_distance
        (32, 128)
    """

    __repr__ = Scheme.short_repr

    name: ClassVar[str] = "t5"
    summary: ClassVar[str] = "T5's bias: a learned number for each bucket of distances and head"
    source: ClassVar[str] = "https://arxiv.org/abs/1910.10683"
    kind: ClassVar[Kind] = "bias"
    fitted_fields: ClassVar[tuple[str, ...]] = ("init_std", "start")

    num_buckets: int = 32
    max_distance: int = 128
    init_std: float = 0.0
    seed: int = 0
    start: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        checks.whole(self.name, "num_buckets", self.num_buckets, minimum=2, maximum=MOST_BUCKETS)
        checks.whole(self.name, "max_distance", self.max_distance, minimum=1, maximum=FARTHEST)
        object.__setattr__(
            self, "init_std", checks.number(self.name, "init_std", self.init_std, minimum=0.0, maximum=1e3)
        )
        checks.whole(self.name, "seed", self.seed, minimum=0, maximum=checks.LARGEST_SEED)
        if self.start is not None:
            object.__setattr__(self, "start", _rows(self.name, self.start, self.num_buckets))
            if self.init_std:
                raise SchemeError(
                    f"{self.name}: start already sets the initial table, got init_std={self.init_std:g} as well."
                )

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        side = self.num_buckets if geometry.causal else self.num_buckets // 2
        if side < 2 or (self.num_buckets % 2 and not geometry.causal):
            raise SchemeError(
                f"{self.name}: in an encoder half of num_buckets are for each side, so it must be even and at least "
                f"4, got {self.num_buckets}."
            )
        if self.max_distance <= side // 2:
            raise SchemeError(
                f"{self.name}: num_buckets={self.num_buckets} gives each of the first {side // 2} distances its "
                f"own bucket here, so max_distance must be more than {side // 2}, got {self.max_distance}."
            )
        if self.start is not None and len(self.start[0]) != geometry.num_heads:
            raise SchemeError(
                f"{self.name}: start has {len(self.start[0])} numbers for each bucket, and this model has "
                f"{geometry.num_heads} heads; give one each."
            )
        return self

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return T5Mechanism(self, geometry)

    def features(self, distances: Tensor, geometry: Geometry) -> Tensor:
        known = buckets(self.num_buckets, self.max_distance, causal=geometry.causal)
        row = known[distances.clamp(-self.max_distance, self.max_distance) + self.max_distance]  # [N]
        return torch.nn.functional.one_hot(row, self.num_buckets).T.double()

    def with_weights(self, weights: Tensor, geometry: Geometry) -> Self:
        """Return a copy that starts with `weights` [H, num_buckets]; unseen buckets take the next nearer one's value.

        Zero would be a bias like any other there, and would usually favour far keys.
        """
        filled = weights.clone()
        side = self.num_buckets if geometry.causal else self.num_buckets // 2
        for bucket in range(self.num_buckets):
            if filled[:, bucket].isnan().any():  # the first of a side: nothing lies after the query, or at its place
                filled[:, bucket] = filled[:, bucket - 1] if bucket % side else filled[:, 0].nan_to_num()
        return dataclasses.replace(self, start=tuple(tuple(rounded(row)) for row in filled.T))

    def __str__(self) -> str:
        """Return the usual form, without the hundreds of numbers in `start`."""
        if self.start is None:
            return super().__str__()
        plain = str(dataclasses.replace(self, start=None))
        return f"{plain[:-1]}, start={len(self.start)}x{len(self.start[0])} numbers)"


class T5Mechanism(DistanceMechanism):
    """Adds table[bucket(i - j), h] to the scores.

    Attributes:
        table: learned, [num_buckets, H].
    """

    def __init__(self, scheme: T5Bias, geometry: Geometry) -> None:
        super().__init__()
        self.max_distance = self.settles_at = scheme.max_distance
        self.bucket = buckets(scheme.num_buckets, scheme.max_distance, causal=geometry.causal)
        start = torch.zeros(scheme.num_buckets, geometry.num_heads, dtype=torch.float32, device="cpu")
        if scheme.start is not None:
            start = torch.tensor(scheme.start, dtype=torch.float32, device="cpu")
        elif scheme.init_std:
            start.normal_(std=scheme.init_std, generator=generator(scheme.seed))
        self.table = parameter(start)

    def distance_bias(self, distances: Tensor) -> Tensor:
        if self.bucket.device != distances.device:
            self.bucket = self.bucket.to(distances.device)
        row = distances.clamp(-self.max_distance, self.max_distance) + self.max_distance
        by_distance = self.table.float()[self.bucket].T  # [H, 2 max_distance + 1]
        return by_distance.index_select(1, row)

    def extra_repr(self) -> str:
        return f"buckets={self.table.shape[0]}, heads={self.table.shape[1]}, max_distance={self.max_distance}"
