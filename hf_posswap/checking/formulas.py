"""The angles that rope parameters name, from the papers' formulas in float64: nothing of transformers is called."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_posswap.rope_math import default_inv_freq
from hf_posswap.schemes.yarn import temperature

SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def rope_type_of(rope: dict[str, Any]) -> str:
    """Return the rope type of one set of rope parameters."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def rope_angles(rope: dict[str, Any], dim: int, most: int, length: int = 0) -> tuple[Tensor, float]:
    """Return the angles in radians per position, [dim/2] in float64, and the factor on cos and sin.

    Args:
        rope: one set of rope parameters.
        dim: rotated dimensions of a head.
        most: max_position_embeddings.
        length: of the text, in tokens, for dynamic and longrope.

    Raises:
        KeyError, TypeError, ValueError: the parameters are incomplete, or of an unknown type.

    Example:
        >>> rope_angles({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 4, 64)
        (tensor([0.5000, 0.0050], dtype=torch.float64), 1.0)
    """
    kind, theta = rope_type_of(rope), float(rope["rope_theta"])
    plain = default_inv_freq(theta, dim, torch.float64)
    original = rope.get("original_max_position_embeddings") or most
    match kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / rope["factor"], 1.0
        case "proportional":
            turning = int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
            still = torch.arange(dim // 2) >= turning
            return plain.masked_fill(still, 0.0) / (rope.get("factor") or 1.0), 1.0
        case "dynamic":
            growth = rope["factor"] * max(length, most) / most - (rope["factor"] - 1)
            return default_inv_freq(theta * growth ** (dim / (dim - 2)), dim, torch.float64), 1.0
        case "llama3":
            return _llama3(plain, rope, original), 1.0
        case "yarn":
            return _yarn(plain, rope, theta, original, most)
        case "longrope":
            return _longrope(plain, rope, original, most, length)
    raise ValueError(f"no formula for rope type {kind!r}.")


def _llama3(plain: Tensor, rope: dict[str, Any], original: int) -> Tensor:
    """Return the angles of Llama 3.1: slow pairs divided, fast ones kept, a ramp over wavelengths between."""
    slow, fast = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # in the original length
    ramp = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return plain * (ramp + (1 - ramp) / rope["factor"])


def _yarn(plain: Tensor, rope: dict[str, Any], theta: float, original: int, most: int) -> tuple[Tensor, float]:
    """Return the angles and the factor of YaRN."""
    factor = rope.get("factor") or most / original
    dim = 2 * len(plain)

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = (last - first) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - first) / span).clamp(0, 1)
    angles = plain * (1 - ramp) + plain / factor * ramp
    given, scale, scale_all = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return angles, float(given)
    if scale and scale_all:
        return angles, temperature(factor, scale) / temperature(factor, scale_all)
    return angles, temperature(factor)


def _longrope(plain: Tensor, rope: dict[str, Any], original: int, most: int, length: int) -> tuple[Tensor, float]:
    """Return the angles and the factor of LongRoPE."""
    factors = rope["long_factor" if length > original else "short_factor"]
    if len(factors) != len(plain):
        raise ValueError(f"{len(factors)} factors for {len(plain)} angles.")
    growth, given = rope.get("factor") or most / original, rope.get("attention_factor")
    usual = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    return plain / torch.tensor(factors, dtype=torch.float64), usual if given is None else float(given)


def theta_of(angles: Tensor) -> float | None:
    """Return the theta whose plain angles these are; None: they are those of no theta.

    Example:
        >>> theta_of(default_inv_freq(500000.0, 8))
        500000.0
    """
    angles = angles.detach().double().cpu()
    pairs = len(angles)
    if pairs < 2 or not bool(torch.isfinite(angles).all()) or float(angles.min()) <= 0:
        return None
    theta = float((angles[0] / angles[1]) ** pairs)
    if not (1 < theta < 1e30) or not torch.allclose(
        angles, default_inv_freq(theta, 2 * pairs, torch.float64), rtol=1e-3
    ):
        return None
    return float(f"{theta:.4g}")
