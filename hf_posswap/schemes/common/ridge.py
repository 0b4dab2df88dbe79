"""Ridge regression of a learned position table on the rows of a formula.

Hoerl and Kennard 1970, https://doi.org/10.1080/00401706.1970.10488634.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 1e-8
"""Relative to the largest singular value: smaller ones are directions that a fit cannot have used."""


def ridge_map(features: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """Return W = argmin ||X W - Y||^2 + penalty ||W||^2, [F, E], float64.

    Of the two equal forms, (X'X + penalty I)^-1 X'Y and X'(XX' + penalty I)^-1 Y, the one with the smaller system is
    solved.

    Args:
        features: X, [L, F], float64.
        targets: Y, [L, E], float64.
        penalty: above 0.

    Example:
        >>> ridge_map(torch.eye(2).double(), torch.tensor([[3.0], [6.0]]).double(), 2.0).flatten().tolist()
        [1.0, 2.0]
    """
    count, width = features.shape
    if count < width:
        gram = features @ features.T + penalty * torch.eye(count, dtype=torch.float64, device="cpu")
        return features.T @ torch.linalg.solve(gram, targets)
    gram = features.T @ features + penalty * torch.eye(width, dtype=torch.float64, device="cpu")
    return torch.linalg.solve(gram, features.T @ targets)


def in_span(rows: Tensor, features: Tensor) -> Tensor:
    """Return the projection of `rows` onto linear maps of `features` plus a constant row.

    Args:
        rows: [P, E], float64.
        features: [P, F], float64.

    Returns:
        The nearest such rows, [P, E], float64.

    Example:
        >>> line = torch.arange(3, dtype=torch.float64)[:, None]
        >>> in_span(torch.tensor([[1.0], [0.0], [2.0]]).double(), line).flatten().round(decimals=6).tolist()
        [0.5, 1.0, 1.5]
    """
    columns = torch.cat((features, torch.ones_like(features[:, :1])), dim=-1)  # [P, F + 1]
    weights = torch.linalg.lstsq(columns, rows, rcond=_SMALLEST, driver="gelsd").solution
    return columns @ weights
