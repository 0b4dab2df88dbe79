"""A checkpoint's config.json, as it stands on disk, held against the config that was loaded from it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from hf_posswap.checking.formulas import rope_type_of
from hf_posswap.checking.settings import THETAS
from hf_posswap.checkpoints.doctor_findings import Finding
from hf_posswap.families.rope_config import config_parts

_SETTINGS = ("rope_parameters", "rope_scaling")
_INNER = ("text_config", "llm_config", "language_config")
"""Names under which composed configs have carried their language model's."""
_SPELLED = {"su": "longrope"}
_NO_SCALING = ("default", "mrope")
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_OF_TYPE: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "proportional": {"factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}  # fmt: skip
_SCALING = set.union(*_OF_TYPE.values()) - {"original_max_position_embeddings"}
_KNOWN = _COMMON | set.union(*_OF_TYPE.values())


def lost_findings(raw: dict[str, Any], config: Any) -> Iterator[Finding]:
    """Yield thetas and scalings of config.json that are not in the config loaded from it.

    Args:
        raw: the content of config.json.
        config: the config of the model.
    """
    inner = {name: value for name, value in raw.items() if isinstance(value, dict) and name not in _SETTINGS}
    text = config.get_text_config()
    layered_config = config if _layers(config) else text
    yield from _lost(raw, layered_config, "config.json")
    for name, values in inner.items():
        loaded = getattr(config, name, None)
        if hasattr(loaded, "to_dict"):
            yield from _lost(values, loaded, f"config.json: {name}")
        elif name in _INNER:
            yield from _lost(values, text, f"config.json: {name}")


def _layers(config: Any) -> list[dict[str, Any]]:
    """Return the sets of rope parameters of a loaded config; [] where it has none."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or not rope:
        return []
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def _lost(raw: dict[str, Any], config: Any, where: str) -> Iterator[Finding]:
    """Yield what one config on disk says about rope, and the loaded one does not."""
    layers = _layers(config)
    if not layers:
        return
    thetas = [layer.get("rope_theta") for layer in layers]
    settings = [(name, raw[name]) for name in _SETTINGS if isinstance(raw.get(name), dict)]
    inside = [value.get("rope_theta") for _, value in settings]
    thetas_in_file = {name: raw[name] for name in THETAS if isinstance(raw.get(name), (int, float))}
    for name, value in thetas_in_file.items():
        if value not in thetas and all(theta is None for theta in inside):
            yield _lost_theta(f"{where}: {name}", value, thetas, config)
    for name, setting in settings:
        theta = setting.get("rope_theta")
        if isinstance(theta, (int, float)) and theta not in thetas:
            yield _lost_theta(f"{where}: {name}.rope_theta", theta, thetas, config)
        yield from _lost_scaling(f"{where}: {name}", setting, layers, config)


def _lost_theta(where: str, value: float, thetas: list[Any], config: Any) -> Finding:
    loaded = " and ".join(
        dict.fromkeys(f"{theta:g}" if isinstance(theta, (int, float)) else "null" for theta in thetas)
    )
    return Finding(
        "error", where, f"it is {value:g} on disk, and the model computes with theta {loaded}: {type(config).__name__} "
        "does not take it from there, and the model reads its weights by other angles.",
        f'Write "rope_parameters": {{"rope_type": "default", "rope_theta": {value:g}}} into config.json (with the '
        "scaling's own keys, if there is one), and remove the old keys.", "theta-lost",
    )  # fmt: skip


def _lost_scaling(where: str, setting: dict[str, Any], layers: list[dict[str, Any]], config: Any) -> Iterator[Finding]:
    """Yield a scaling on disk of which the loaded config has another type, or other values."""
    if any(isinstance(value, dict) for value in setting.values()):
        return
    rope_type = _SPELLED.get(rope_type_of(setting), rope_type_of(setting))
    if rope_type in _NO_SCALING:
        return
    same = [layer for layer in layers if rope_type_of(layer) == rope_type]
    keys = _OF_TYPE.get(rope_type, set())
    agree = [layer for layer in same if all(layer.get(key) == setting[key] for key in keys & setting.keys())]
    if not agree:
        loaded = " and ".join(dict.fromkeys(rope_type_of(layer) for layer in layers))
        problem = f"it is {rope_type!r} on disk, and the model computes with rope type {loaded}" if not same else (
            f"its values are not those of the loaded rope type {rope_type!r}"
        )  # fmt: skip
        yield Finding(
            "error", where, f"{problem}: {type(config).__name__} does not take them from there.",
            "Write them to rope_parameters in config.json, with rope_type and rope_theta, and remove the old keys.",
            "scaling-lost",
        )  # fmt: skip


def key_findings(config: Any) -> Iterator[Finding]:
    """Yield keys of rope parameters that have no effect: those of another rope type, and misspelled ones."""
    for path, sub_config in config_parts(config).items():
        rope = getattr(sub_config, "rope_parameters", None)
        if not isinstance(rope, dict):
            continue
        nested = {name: value for name, value in rope.items() if isinstance(value, dict)}
        for name, layer in (nested or {"": rope}).items():
            where = ".".join(filter(None, ["config", path, "rope_parameters", name]))
            yield from _keys(layer, where, set(getattr(sub_config, "ignore_keys_at_rope_validation", None) or ()))


def _keys(rope: dict[str, Any], where: str, ignored: set[str]) -> Iterator[Finding]:
    rope_type = rope_type_of(rope)
    if rope_type not in _OF_TYPE:
        return
    for key, value in rope.items():
        if value is None or key in ignored | _COMMON | _OF_TYPE[rope_type]:
            continue
        if key in _SCALING and value not in (1, False):
            yield Finding(
                "warning", f"{where}.{key}", f"rope type {rope_type!r} does not read it: {_short(value)} has no "
                "effect.",
                "Write the rope type that it belongs to as rope_type, or remove it.", "rope-key",
            )  # fmt: skip
        elif key not in _KNOWN:
            near = difflib.get_close_matches(key, _KNOWN, n=1, cutoff=0.75)
            if near:
                yield Finding(
                    "warning", f"{where}.{key}", f"transformers has no such key: {_short(value)} has no effect.",
                    f"Did you mean {near[0]}?", "rope-key",
                )  # fmt: skip


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]}..."
