"""FIRE: a small network maps distance, relative to the query's own position, to a bias.

Li et al. 2023, https://arxiv.org/abs/2310.04418, equation 5 and appendix E.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.compat.torch_tensors import transforms_active
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.piecewise_bias import PiecewiseBias
from hf_posswap.schemes.base import SCHEMES, Kind, Scheme, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.bias import distances, generator, parameter, uniform
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.devices import without_autocast

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

    f is a network 1 -> width -> ReLU -> H; it, c and M are learned and shared by the layers. Distances are measured
    against the query's position i, so all of them lie in [0, 1] at any length; below the threshold |M| L only
    differences of positions matter, above it i itself does. M starts at 1, f is initialized as torch's linear layers
    are.

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
        self.c = parameter(torch.tensor([scheme.c], dtype=torch.float32, device="cpu"))
        self.multiplier = parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
        # initialized like nn.Linear: uniform within 1 / sqrt(inputs). PEFT and quantizers would wrap nn.Linear itself
        self.hidden_weight = parameter(uniform(-1.0, 1.0, (width,), source))
        self.hidden_bias = parameter(uniform(-1.0, 1.0, (width,), source))
        bound = width**-0.5
        self.out_weight = parameter(uniform(-bound, bound, (heads, width), source))
        self.out_bias = parameter(uniform(-bound, bound, (heads,), source))

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        dtype = self._dtype
        distance = distances(query_positions, key_positions).to(dtype)  # [B, Q, K]
        threshold = (self.multiplier.to(dtype) * self.threshold).abs()  # [1]
        reference = torch.maximum(query_positions.to(dtype), threshold)[:, :, None]  # [B, Q, 1]
        share = self._psi(distance) / (self._psi(reference) + EPSILON)  # [B, Q, K]
        with without_autocast(share):
            return self._network(share)

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
            line_slope[:, None] + turns, bends, (weight < 0)[order],
        )  # fmt: skip

    def _network(self, share: Tensor) -> Tensor:
        """Return f_h of `share` [B, Q, K], [B, H, Q, K]."""
        flat = share.flatten(1)[:, None]  # [B, 1, Q K]
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or transforms_active():
            return self._of(flat).unflatten(2, share.shape[1:])
        out = flat.new_empty(len(flat), len(self.out_bias), flat.shape[2])  # [B, H, Q K]
        pairs = max(1, IN_CACHE // len(flat)) if flat.device.type == "cpu" else max(1, flat.shape[2])
        for start in range(0, flat.shape[2], pairs):
            some = slice(start, start + pairs)
            out[..., some] = self._of(flat[..., some])
        return out.unflatten(2, share.shape[1:])

    def _of(self, share: Tensor) -> Tensor:
        """Return f_h of `share` [B, 1, n], [B, H, n]."""
        dtype = share.dtype
        inner, outer = self.hidden_bias.to(dtype)[:, None], self.out_bias.to(dtype)[:, None]
        hidden = (self.hidden_weight.to(dtype)[:, None] * share).add_(inner).relu_()  # [B, W, n]
        # matmul takes another path, with other rounding, for frozen weights
        return torch.einsum("hw,bwn->bhn", self.out_weight.to(dtype), hidden) + outer

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the computation: float32, or float64 if the parameters are."""
        return torch.promote_types(self.out_weight.dtype, torch.float32)

    def _psi(self, length: Tensor) -> Tensor:
        """Return ln(1 + |c length|)."""
        return (self.c.to(length.dtype) * length).abs().log1p()

    def extra_repr(self) -> str:
        heads, width = self.out_weight.shape
        return f"heads={heads}, width={width}, threshold={self.threshold:g}"
