"""Shared by the bias schemes: distances, learned parameters and their initialization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.mechanism import Mechanism


def distances(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return query position less key position, in tokens, [B, Q, K], of positions [B or 1, Q] and [B or 1, K].

    Example:
        >>> distances(torch.tensor([[5]]), torch.tensor([[4, 5, 7]]))
        tensor([[[ 1,  0, -2]]])
    """
    return query_positions[:, :, None] - key_positions[:, None, :]


class DistanceMechanism(Mechanism):
    """Adds a bias that depends on the distance alone, which a subclass defines in `distance_bias`."""

    biases = True
    distance_only = True

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = distances(query_positions, key_positions)  # [B, Q, K]
        return self.distance_bias(distance.flatten()).unflatten(1, distance.shape).transpose(0, 1)  # [B, H, Q, K]


NEGLIGIBLE = 1e-10
"""Eigenvalues of normal equations below this share of the largest are treated as 0: a constant for all keys."""


@dataclass(frozen=True)
class FittedBias(Scheme):
    """A scheme whose bias of distance can be fitted for each head."""

    fitted_fields: ClassVar[tuple[str, ...]]
    """Names of the fields that the fit determines."""

    def fitted(self, target: Tensor, weights: Tensor, distances: Tensor, geometry: Geometry) -> Self:
        """Return a copy with the bias b of each head that minimizes the sum of w_d (target(d) - b(d) - c)^2, c free.

        Args:
            target: the bias to approximate, of a resolved scheme, [H, N], float64.
            weights: w_d of each head, [H, N], float64.
            distances: query position less key position, in tokens, [N].
            geometry: of the model.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LinearBias(FittedBias):
    """A scheme whose bias is a weighted sum of functions of the distance, with weights for each head."""

    def features(self, distances: Tensor, geometry: Geometry) -> Tensor:
        """Return the functions, of a resolved scheme, of `distances` [N], query position less key position.

        [F, N], float64.
        """
        raise NotImplementedError

    def with_weights(self, weights: Tensor, geometry: Geometry) -> Self:
        """Return a copy in which each head has these `weights` of the functions, [H, F].

        NaN marks the weights of functions that are 0 at every observed distance.
        """
        raise NotImplementedError

    def fitted(self, target: Tensor, weights: Tensor, distances: Tensor, geometry: Geometry) -> Self:
        functions = self.features(distances, geometry)  # [F, N]
        free = torch.cat([functions, torch.ones_like(target[:1])])  # [F + 1, N]
        weighted = free * weights[:, None]  # [H, F + 1, N]
        inverses = torch.linalg.pinv(weighted @ free.T, rtol=NEGLIGIBLE, hermitian=True)  # [H, F + 1, F + 1]
        solved = (inverses @ (weighted @ target[:, :, None]))[:, :-1, 0]  # [H, F], of minimum norm
        return self.with_weights(solved.masked_fill(~functions.any(dim=1), torch.nan), geometry)


def rounded(values: Tensor) -> list[float]:
    """Return `values` [N] with six significant digits: a fit is less precise than that, and people read the numbers.

    Example:
        >>> rounded(torch.tensor([0.123456789, 12.0], dtype=torch.float64))
        [0.123457, 12.0]
    """
    return [float(f"{value:.6g}") for value in values.tolist()]


def inverse_softplus(values: Tensor) -> Tensor:
    """Return x with softplus(x) = `values`, which are above 0.

    Example:
        >>> torch.nn.functional.softplus(inverse_softplus(torch.tensor([0.25, 30.0])))
        tensor([ 0.2500, 30.0000])
    """
    return torch.where(values > 20, values, values.expm1().log())


def parameter(values: Tensor) -> nn.Parameter:
    """Return a parameter initialized to `values`; it is on meta while a checkpoint's skeleton is built there."""
    return nn.Parameter(values.to(torch.empty(0).device))  # torch 2.6 names no default device inside `with`


def generator(seed: int) -> torch.Generator:
    """Return a separate random generator: planning and checking a swap leave torch's global one unchanged."""
    return torch.Generator(device="cpu").manual_seed(seed)


def uniform(low: float, high: float, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Return random numbers in [low, high), of `shape`, float32."""
    return torch.empty(shape, dtype=torch.float32, device="cpu").uniform_(low, high, generator=source)
