"""Rope parameters in a model's config: those of a scheme, read back as transformers would, or marked as unsupported."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.families.rope_config import config_at, parameters_of
from hf_posswap.families.sites import Stack
from hf_posswap.patching.record.refusals import POSSWAP_ROPE_TYPE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RopeValues = dict[str, dict[str, Any]]
"""Rope parameters by layer type; see `families.rope_config`."""

# keys that rope types may set; every other key (mrope_section, ...) belongs to the model and is kept
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim",
    "truncate",
}  # fmt: skip


def with_rope(config: Any, values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the `rope_parameters` of `config` with the rope keys of the sets in `values` replaced.

    Args:
        config: the sub-config that has them.
        values: new rope keys, by the name of their set; the model's own keys, and the other sets, are kept.
    """
    changed = {}
    for name, given in values.items():
        old = parameters_of(config, name)
        # the attention of Ministral 3 and similar models scales queries by it, whatever the rope type
        kept = _ROPE_KEYS - ({"original_max_position_embeddings"} if "llama_4_scaling_beta" in old else set())
        changed[name] = {key: value for key, value in old.items() if key not in kept} | given
    return changed[""] if "" in changed else copy.deepcopy(config.rope_parameters) | changed


def trial_config(
    config: PreTrainedConfig, path: str, values: dict[str, dict[str, Any]], length: int
) -> PreTrainedConfig:
    """Return a copy of `config` whose sub-config at `path` has these rope parameters and this length."""
    trial = copy.deepcopy(config)
    text = config_at(trial, path)
    text.max_position_embeddings = length
    text.rope_parameters = with_rope(text, values)
    text.standardize_rope_params()
    return with_real_dtype(trial, text)


def with_real_dtype(config: Any, subconfig: Any) -> Any:
    """Return `config` with a torch dtype in it and in its `subconfig`, where saving has left a name."""
    for target in (config, subconfig):
        if isinstance(target.dtype, str):
            target.dtype = getattr(torch, target.dtype)
    return config


def read_back(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return `config` as read back from a checkpoint; None: its class refuses to read it."""
    try:
        return type(config).from_dict(config.to_dict())
    except Exception:  # config validators may raise anything
        return None


def says(config: Any, values: dict[str, dict[str, Any]]) -> bool:
    """Return whether `config` still has `values` after transformers has standardised it: some models override them."""
    actual = {name: parameters_of(config, name) for name in values}
    return all(actual[name].get(key) == value for name, given in values.items() for key, value in given.items())


def refused_values(model: Any, stack: Stack, layer_types: tuple[str, ...]) -> dict[str, Any]:
    """Return config values, by path, that stock transformers refuses, for identity rotations."""
    config = config_at(model.config, stack.config)
    refused = {name: {"rope_type": POSSWAP_ROPE_TYPE, "rope_theta": base_of(config, name)} for name in layer_types}
    return {f"{stack.config}.rope_parameters".lstrip("."): with_rope(config, refused)}


def base_of(config: Any, layer_type: str) -> float:
    """Return theta of the layers of one type."""
    return float(parameters_of(config, layer_type).get("rope_theta") or 10000.0)
