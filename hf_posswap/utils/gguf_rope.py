"""Rope parameters from the metadata and tensors of a GGUF file: what transformers' reader leaves out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.printable import brief_repr

FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors of divisors [D/2]: llama.cpp turns pair i by theta^(-2i/D) / divisor_i each token."""
_DEFAULT_THETA = 1e4
"""llama.cpp's, where a file names none."""
_CLOSE = 1e-5
_KINDS: dict[str, type[int] | type[float]] = {
    "rope.dimension_count": int,
    "rope.freq_base": float,
    "rope.freq_base_swa": float,
    "rope.scale_linear": float,
    "rope.scaling.attn_factor": float,
    "rope.scaling.factor": float,
    "rope.scaling.original_context_length": int,
    "rope.scaling.yarn_attn_factor": float,
    "rope.scaling.yarn_beta_fast": float,
    "rope.scaling.yarn_beta_slow": float,
    "rope.scaling.yarn_ext_factor": float,
}
"""Numbers of a rotation, and their kind as llama.cpp reads them."""


def rope_parameters(path: Path, architecture: str, config: Any, keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Put the rotation that a file describes into `config`.

    Args:
        path: the file, for errors.
        architecture: as llama.cpp calls it, for errors.
        config: of transformers, with the other keys of the file in it.
        keys: those of the architecture that begin with "rope.", which are taken out.
        tensors: those in `FACTOR_TENSORS`, by name.

    Raises:
        CheckpointError: a rotation that the config's class does not have, or a key that is not known.
    """
    keys, current = dict(keys), getattr(config, "rope_parameters", None)
    if not current:
        if keys or tensors:
            raise _refusal(path, config, [*_with_values(keys), *sorted(tensors)], "which has no rotation")
        return
    sets = [value for value in current.values() if isinstance(value, dict)]
    if sets:
        _of_layer_types(path, config, current, keys, tensors)
        return
    theta = float(keys.pop("rope.freq_base", _DEFAULT_THETA))
    rope: dict[str, Any] = {"rope_theta": theta}
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    turned = int(keys.pop("rope.dimension_count", width))
    share = current.get("partial_rotary_factor")
    if turned != width if share is None else turned > width:
        raise _refusal(
            path, config, ["rope.dimension_count"], f"which rotates {width} dimensions of a head, not {turned}"
        )
    if share is not None:
        rope["partial_rotary_factor"] = turned / width
    rope |= _scaling(path, config, keys, tensors, theta, turned)
    if keys:
        names = [f"{architecture}.{name}" for name in _with_values(keys)]
        raise _refusal(path, config, names, "in which they have no place")
    config.rope_parameters = rope
    if hasattr(config, "original_max_position_embeddings"):  # of Phi-3, where it goes before that of rope_parameters
        config.original_max_position_embeddings = rope.get(
            "original_max_position_embeddings", config.max_position_embeddings
        )


def refuse_wrong_numbers(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Refuse numbers that no rotation has: of another kind than the key's, not finite, zero or negative.

    Zero too: llama.cpp takes some of them for unset, and divides by others.

    Args:
        path: the file, for errors.
        architecture: as llama.cpp calls it.
        keys: as of `rope_parameters`.
        tensors: as of `rope_parameters`.

    Raises:
        CheckpointError: there is such a number; the message names its key and shows it.
    """
    for name, value in keys.items():
        kind = _KINDS.get(name)
        if kind is None:  # a text, or a key that is refused as a whole
            continue
        if not (type(value) is kind and 0 < value < math.inf):
            expected = "whole number" if kind is int else "finite floating-point number"
            raise _damage(path, f"{architecture}.{name} = {brief_repr(value, 80)}", f"expected is a {expected} above 0")
    for name, tensor in tensors.items():
        wrong = [value for value in np.asarray(tensor.data).ravel().tolist() if not 0 < value < math.inf]
        if wrong:
            raise _damage(path, f"{name} with {wrong[0]}", "expected are divisors that are finite and above 0")


def _damage(path: Path, content: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{shown(path)} has {content}: {expected}. Get the file again from its source.")


def _with_values(keys: dict[str, Any]) -> list[str]:
    return [f"{name} = {brief_repr(value, 80)}" for name, value in sorted(keys.items())]


def _of_layer_types(
    path: Path, config: Any, current: dict[str, Any], keys: dict[str, Any], tensors: dict[str, Any]
) -> None:
    """Take the base of each type of layers; the scaling is that of full attention, as llama.cpp has it."""
    bases = {
        "full_attention": keys.pop("rope.freq_base", None),
        "sliding_attention": keys.pop("rope.freq_base_swa", None),
    }
    width = int(config.head_dim)
    if (turned := int(keys.pop("rope.dimension_count", width))) != width:
        raise _refusal(
            path, config, ["rope.dimension_count"], f"which rotates {width} dimensions of a head, not {turned}"
        )
    factor = float(keys.pop("rope.scaling.factor", None) or 1.0)
    scaling = keys.pop("rope.scaling.type", "linear" if factor != 1.0 else "none")
    original = int(keys.pop("rope.scaling.original_context_length", None) or config.max_position_embeddings)
    yarn = _yarn(keys, factor, original, 1.0) if scaling == "yarn" else {}
    if (
        keys
        or tensors
        or "full_attention" not in current
        or scaling not in ("linear", "none", "yarn")
        or not bases["full_attention"]
    ):
        names = [*_with_values(keys), *sorted(tensors)]
        names = names or [f"rope.scaling.type {scaling}, rope.freq_base {bases['full_attention']}"]
        raise _refusal(path, config, names, "where each type of layers rotates in its own way")
    for name, base in bases.items():
        if base is not None and name in current:
            current[name]["rope_theta"] = float(base)
    if scaling == "linear" and factor != 1.0:
        current["full_attention"] |= {"rope_type": "linear", "factor": factor}
    current["full_attention"] |= yarn


def _scaling(
    path: Path, config: Any, keys: dict[str, Any], tensors: dict[str, Any], theta: float, turned: int
) -> dict[str, Any]:
    """Return the rope type and its parameters, and take their keys out."""
    factor = float(keys.pop("rope.scaling.factor", None) or keys.pop("rope.scale_linear", None) or 1.0)
    scaling = str(keys.pop("rope.scaling.type", "linear" if factor != 1.0 else "none"))  # llama.cpp's default
    length = int(config.max_position_embeddings)
    original = int(keys.pop("rope.scaling.original_context_length", None) or length)
    attention = float(keys.pop("rope.scaling.attn_factor", None) or 1.0)
    lists = {name: [float(value) for value in np.asarray(tensor.data).ravel()] for name, tensor in tensors.items()}
    wrong = [name for name, values in lists.items() if len(values) != turned // 2]
    if wrong:
        raise _refusal(path, config, wrong, f"which rotates {turned // 2} pairs of a head")
    short, long = lists.get("rope_factors_short.weight"), lists.get("rope_factors_long.weight")
    fixed = lists.get("rope_freqs.weight")
    if short is not None and long is not None and fixed is None and factor == 1.0 and scaling in ("longrope", "none"):
        return _lists(short, long, original, attention)
    if short is not None or long is not None or scaling == "longrope":
        raise _refusal(path, config, [f"rope.scaling.type {scaling}", *lists], "in this combination")
    if scaling == "yarn" and fixed is None:
        return _yarn(keys, factor, original, attention)
    if scaling not in ("linear", "none") or (fixed is not None and factor != 1.0):
        raise _refusal(path, config, [f"rope.scaling.type {scaling}", *lists], "in this combination")
    scale = factor if scaling == "linear" else 1.0
    if fixed is None and attention == 1.0:
        return {"rope_type": "default"} if scale == 1.0 else {"rope_type": "linear", "factor": scale}
    if fixed is not None and attention == 1.0:
        llama3 = _llama3(fixed, theta, length)
        if llama3 is not None:
            return llama3
    divisors = fixed or [scale] * (turned // 2)
    return _lists(divisors, divisors, original, attention)


def _lists(short: list[float], long: list[float], original: int, attention: float) -> dict[str, Any]:
    """Return LongRoPE with these divisors: with two equal lists, any rotation by fixed angles."""
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": 1.0,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _yarn(keys: dict[str, Any], factor: float, original: int, attention: float) -> dict[str, Any]:
    """Return YaRN: llama.cpp multiplies cos and sin by 0.1 ln s + 1 times the factor of the file."""
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        value = float(keys.pop(f"rope.scaling.yarn_{name}", default))
        if value != default:
            rope[name] = value
    if attention != 1.0:
        rope["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    for name in ("ext", "attn"):  # 1: as YaRN has them
        if keys.get(f"rope.scaling.yarn_{name}_factor") == 1.0:
            del keys[f"rope.scaling.yarn_{name}_factor"]
    return rope


def _llama3(divisors: list[float], theta: float, length: int) -> dict[str, Any] | None:
    """Return the parameters of Llama 3's scaling that has these divisors; None: it is another one.

    In its band, 1 / divisor is a straight line over L / wavelength; outside, the divisor is 1 or the factor.
    """
    values = np.array(divisors, dtype=np.float64)
    factor = float(f"{values[-1]:.6g}")
    if not 1.0 < factor < 1e4:
        return None
    plain = theta ** (-2.0 * np.arange(len(values)) / (2 * len(values)))
    turns = plain / (2 * math.pi)  # 1 / wavelength
    kept = (1 / values - 1 / factor) / (1 - 1 / factor)
    band = (kept > 1e-4) & (kept < 1 - 1e-4)
    guesses = [(8192, 4.0), (length, 4.0), (round(length / factor), 4.0)]
    if band.sum() >= 2:
        slope, offset = np.polyfit(turns[band], kept[band], 1)  # kept = (L turns - 1) / (h - 1)
        if offset < 0 < slope:
            guesses.insert(0, (round(slope / -offset), float(f"{1 - 1 / offset:.4g}")))
    for original, high in guesses:
        share = np.clip((original * turns - 1.0) / (high - 1.0), 0, 1)
        if np.allclose(1 / ((1 - share) / factor + share), values, rtol=_CLOSE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None


def _refusal(path: Path, config: Any, names: list[str], why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} has {', '.join(names)}, and transformers makes a {type(config).__name__} of it, {why}: its positions "
        "would be lost. Take the checkpoint that the file was made from."
    )
