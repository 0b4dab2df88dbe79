"""What each program makes of its overrides, by its own rule, and whether that is the swap."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.rope_config import config_at

Apply = Callable[[Any, dict[str, Any]], Any]

READ_BY_TYPE: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "alpha", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate", "attn_factor", "extrapolation_factor", "apply_yarn_scaling",
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor", "short_mscale",
        "long_mscale",
    },
    "proportional": {"factor"},
}  # fmt: skip
"""By rope type, the keys besides the base and the rotated share that a program may read."""


def by_transformers(config: Any, values: dict[str, Any]) -> Any:
    """Return `config` as `from_pretrained` loads it with `values` as arguments."""
    return type(config).from_dict(config.to_dict(), **copy.deepcopy(values))


def by_vllm(config: Any, values: dict[str, Any]) -> Any:
    """Return `config` as vLLM has it after `--hf-overrides`: whole dicts, merged ones in a sub-config."""
    applied = copy.deepcopy(config)
    for name, value in values.items():
        inner = getattr(applied, name, None)
        if isinstance(value, dict) and _is_config(inner):
            _merge(inner, value)
        else:
            setattr(applied, name, copy.deepcopy(value))
    return applied


def by_sglang(config: Any, values: dict[str, Any]) -> Any:
    """Return `config` as SGLang has it after `--json-model-override-args`: rope parameters are merged."""
    applied = copy.deepcopy(config)
    for name, value in copy.deepcopy(values).items():
        current: Any = getattr(applied, name, None)
        if isinstance(value, dict) and _is_config(current):
            current.update(value)
        elif name in ("rope_scaling", "rope_parameters") and isinstance(value, dict) and isinstance(current, dict):
            setattr(applied, name, {**current, **value})
        else:
            setattr(applied, name, value)
    return applied


def by_axolotl(config: Any, values: dict[str, Any]) -> Any:
    """Return `config` as axolotl has it after `overrides_of_model_config`."""
    applied = copy.deepcopy(config)
    for name, value in copy.deepcopy(values).items():
        setattr(applied, name, value)
    return applied


def check_applied(
    apply: Apply, config: Any, values: dict[str, Any], wanted: dict[str, dict[str, Any]], instead: str
) -> Any:
    """Return the config that a program has after its overrides, if its rope parameters are the wanted ones.

    Args:
        apply: the program's rule.
        config: of the unswapped model.
        values: the overrides, nested as the program takes them.
        wanted: the rope parameters that must result, by the path of their sub-config.
        instead: what to do where others result, as a sentence.

    Raises:
        UnsupportedSwapError: others result.
    """
    applied = apply(config, values)
    for path, rope in wanted.items():
        actual = getattr(config_at(applied, path), "rope_parameters", None)
        problem = _difference(rope, actual)
        if problem is not None:
            raise UnsupportedSwapError(f"overrides would not give this model the swap: {problem}. {instead}")
    return applied


def _difference(wanted: Any, actual: Any) -> str | None:
    """Return how rope parameters differ from the wanted ones, keys that their type does not read aside; None: alike."""
    if not isinstance(actual, dict):
        return f"rope_parameters would be {actual!r}"
    if any(isinstance(value, dict) for value in wanted.values()):
        known = (_difference(value, actual.get(name)) for name, value in wanted.items() if isinstance(value, dict))
        return next((problem for problem in known if problem is not None), None)
    wrong = {name: actual.get(name) for name, value in wanted.items() if actual.get(name) != value}
    if wrong:
        name, value = next(iter(wrong.items()))
        return f"{name} would be {value!r} instead of {wanted[name]!r}"
    stale = {name for name, value in actual.items() if value is not None} - wanted.keys()
    read = sorted(stale & (READ_BY_TYPE.get(str(wanted.get("rope_type")), set()) | {"partial_rotary_factor"}))
    if read:
        return f"{', '.join(read)} of the model's present rope parameters would stay: the program merges both"
    return None


def vllm_length(config: Any) -> float:
    """Return the most tokens that vLLM 0.33 takes for `--max-model-len`, by the config of the language model."""
    names = (
        "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
        "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
    )  # fmt: skip
    lengths = [getattr(config, name, None) for name in names]
    most = min((length for length in lengths if isinstance(length, int)), default=math.inf)
    factor = 1.0
    if "gemma3" not in config.model_type:
        for rope in _sets(config):
            if rope.get("rope_type") not in ("su", "longrope", "llama3", "yarn"):
                factor = rope.get("factor") or factor
    return (getattr(config, "model_max_length", None) or most) * factor


def sglang_length(config: Any) -> float:
    """Return the most tokens that SGLang 0.5.23 takes for `--context-length`, by the config of the language model."""
    names = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
    length = next((value for name in names if (value := getattr(config, name, None)) is not None), 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    whole = "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3"
    return int(length * (1 if whole else rope.get("factor") or 1))


def _sets(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    inner = [value for value in rope.values() if isinstance(value, dict)]
    return inner or [rope]


def _is_config(value: Any) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _merge(target: Any, updates: dict[str, Any]) -> None:
    for name, value in updates.items():
        inner = target.get(name) if isinstance(target, dict) else getattr(target, name, None)
        if isinstance(value, dict) and (isinstance(inner, dict) or hasattr(inner, "__dict__")):
            _merge(inner, value)
        elif isinstance(target, dict):
            target[name] = value
        else:
            setattr(target, name, value)
