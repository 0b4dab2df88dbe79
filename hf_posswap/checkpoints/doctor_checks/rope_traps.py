"""Problems in the rope settings of a config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeGuard

from hf_posswap.checkpoints.doctor_checks.findings import Finding
from hf_posswap.patching.record.refusals import POSSWAP_ROPE_TYPE

_SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3")
_FROM_ORIGINAL = ("yarn", "longrope", "llama3")
_KNOWN = ("default", *_SCALED, "proportional", POSSWAP_ROPE_TYPE)
_SETTINGS = ("rope_parameters", "rope_scaling")


def rope_findings(config: dict[str, Any], where: str = "config.json") -> Iterator[Finding]:
    """Yield the problems in the rope settings of one config.

    Args:
        config: the content of config.json, or of a config inside it.
        where: its location, for the findings.
    """
    given = [name for name in _SETTINGS if config.get(name)]
    if len(given) == 2 and _spelled_anew(config["rope_parameters"]) != _spelled_anew(config["rope_scaling"]):
        yield Finding(
            "error",
            where,
            "rope_parameters and rope_scaling differ: transformers takes rope_scaling, other programs rope_parameters.",
            "Keep only rope_parameters.",
            "scaling-twice",
        )
    if not given:
        yield from _null_theta(config, {}, where)
        return
    settings = config[given[-1]]
    location = f"{where}: {given[-1]}"
    if not isinstance(settings, dict):
        yield Finding(
            "error",
            location,
            f"must be an object, got {type(settings).__name__}.",
            "Write the rope type there.",
            "rope-settings",
        )
        return
    layers = {key: value for key, value in settings.items() if isinstance(value, dict)}
    thetas = [each.get("rope_theta") for each in layers.values()]
    outer = {key: value for key, value in config.items() if key != "rope_theta" or value not in thetas}
    for name, each in layers.items() if layers else [("", settings)]:
        yield from _of_one(outer, each, f"{location}.{name}".rstrip("."))
        if name and each.get("truncate") is False:
            problem = (
                "truncate: false has no effect in rope parameters for a layer type: transformers reads the outer one."
            )
            yield Finding("warning", f"{location}.{name}", problem, "Put truncate next to the layer types.", "rope-key")


def rope_type(rope: dict[str, Any]) -> str:
    """Return the rope type of one set of rope settings, in the new spelling or the old."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def _of_one(config: dict[str, Any], rope: dict[str, Any], where: str) -> Iterator[Finding]:
    rope_kind = rope_type(rope)
    if "type" in rope and "rope_type" in rope and rope["type"] != rope["rope_type"]:
        problem = f"type is {rope['type']!r} and rope_type {rope['rope_type']!r}: programs differ in which they read."
        yield Finding("error", where, problem, "Keep only rope_type.", "rope-type-twice")
    if rope_kind not in _KNOWN and rope_kind != "su":
        problem = f"rope type {rope_kind!r} is not one of transformers': {', '.join(_KNOWN[:-1])}."
        yield Finding("note", where, problem, "Only a class that defines this type can load it.", "rope-type")
    if rope_kind == POSSWAP_ROPE_TYPE:
        return
    yield from _theta(config, rope, where)
    if rope_kind in _SCALED:
        yield from _factor(config, rope, rope_kind, where)
    if rope_kind in _FROM_ORIGINAL or rope_kind == "dynamic":
        yield from _lengths(config, rope, rope_kind, where)
    if rope_kind == "yarn":
        yield from _yarn(rope, where)
    if rope_kind in ("dynamic", "longrope"):
        problem = f"{rope_kind} follows the length: with a cache, a text that grows beyond the original length is not "
        problem += "computed as one forward would."
        yield Finding(
            "note", where, problem, "Compare lengths by whole forwards, or use yarn or llama3.", "scaling-by-length"
        )


def _spelled_anew(settings: Any) -> Any:
    """Return rope settings with their type only under its new name."""
    if not isinstance(settings, dict):
        return settings
    return {k: v for k, v in settings.items() if k != "type"} | {"rope_type": rope_type(settings)}


def _theta(config: dict[str, Any], rope: dict[str, Any], where: str) -> Iterator[Finding]:
    inside, outside = rope.get("rope_theta"), config.get("rope_theta", config.get("rotary_emb_base"))
    null = list(_null_theta(config, rope, where))
    if null:
        yield from null
    elif inside is None and outside is None:
        yield Finding(
            "warning",
            where,
            "no rope_theta, here or at the top: each program takes its own default, mostly 10000.",
            "Write the base that the model was trained with to rope_parameters.rope_theta.",
            "theta-missing",
        )
    elif inside is None and "rope_parameters" in where:
        yield Finding(
            "warning",
            where,
            f"rope_theta {outside} is at the top of the config and not in rope_parameters.",
            "Move it there: programs that read only rope_parameters take 10000.",
            "theta-outside",
        )
    elif inside is not None and outside is not None and inside != outside:
        yield Finding(
            "error",
            where,
            f"rope_theta is {inside} here and {outside} at the top of the config.",
            "transformers takes the one here, older programs the other: write the right one in both places.",
            "theta-twice",
        )
    value = outside if inside is None else inside
    if value is not None and not (_is_number(value) and value > 1):
        yield Finding(
            "error",
            where,
            f"rope_theta is {value!r}, not a number above 1.",
            "Write the base of the model.",
            "theta-value",
        )


def _null_theta(config: dict[str, Any], rope: dict[str, Any], where: str) -> Iterator[Finding]:
    """Yield the finding that the theta in force is null: transformers takes that for a value, not for its default."""
    inside = "rope_theta" in rope
    if (rope if inside else config).get("rope_theta", 0) is None:
        yield Finding(
            "error",
            where,
            f"rope_theta is null{'' if inside or not rope else ' at the top of the config'}: transformers computes no "
            "angles from it, and no model can be built.",
            "Write the base that the model was trained with to rope_parameters.rope_theta: its paper or its original "
            "config.json names it (10000 in RoFormer and LLaMA 2, 500000 in Llama 3, 1000000 in Qwen2.5).",
            "theta-null",
        )


def _factor(config: dict[str, Any], rope: dict[str, Any], type_name: str, where: str) -> Iterator[Finding]:
    factor = rope.get("factor")
    if factor is None and type_name == "longrope" and _original(config, rope):
        return
    if not _is_number(factor) or factor < 1:
        problem = f"{type_name} needs a factor >= 1, got {factor!r}."
        yield Finding("error", where, problem, "Write target length over original length.", "scaling-factor")


def _lengths(config: dict[str, Any], rope: dict[str, Any], type_name: str, where: str) -> Iterator[Finding]:
    """Yield contradictions of factor, original length and max_position_embeddings."""
    most, original, factor = config.get("max_position_embeddings"), _original(config, rope), rope.get("factor")
    if type_name == "dynamic":
        if original is not None and most is not None and most != original:
            yield Finding(
                "error",
                where,
                f"dynamic takes its original length from max_position_embeddings, {most}, and not from "
                f"original_max_position_embeddings, {original}: nothing is scaled before {most} tokens.",
                f"Set max_position_embeddings to {original}.",
                "scaling-noop",
            )
        return
    if original is None:
        yield Finding(
            "error" if factor != 1 else "note",
            where,
            f"{type_name} without original_max_position_embeddings: transformers takes max_position_embeddings, "
            f"{most}, which is mostly the extended length.",
            "Write the length before scaling to rope_parameters.original_max_position_embeddings.",
            "scaling-original",
        )
        return
    if not (_is_number(original) and original > 0 and _is_number(most) and _is_number(factor)):
        return
    if factor > 1 and most == original:
        yield Finding(
            "warning",
            where,
            f"max_position_embeddings, {most}, is the original length: serving stacks stop there.",
            f"Set it to the extended length, {round(factor * original)}.",
            "scaling-lengths",
        )
    elif (
        type_name != "llama3" and abs(most - factor * original) > 0.01 * most
    ):  # llama3's factor is not a ratio of lengths
        yield Finding(
            "warning",
            where,
            f"max_position_embeddings is {most}, and factor {factor:g} times {original} is {factor * original:g}.",
            "Make them agree: programs differ in which of the two they take the scale from.",
            "scaling-lengths",
        )


def _yarn(rope: dict[str, Any], where: str) -> Iterator[Finding]:
    factor, given = rope.get("factor"), rope.get("attention_factor")
    scales = [rope.get(name) is not None for name in ("mscale", "mscale_all_dim")]
    if any(scales) and not all(scales) and given is None:
        problem = "mscale and mscale_all_dim act together, and one of them is missing: programs differ in what they do."
        yield Finding("warning", where, problem, "Write attention_factor itself.", "attention-factor")
    if not _is_number(factor) or factor < 1:
        return
    usual = 0.1 * math.log(factor) + 1
    if given is None and any(scales):
        problem = "the attention factor comes from mscale, which vLLM before September 2026 and TGI drop."
        yield Finding(
            "warning",
            where,
            problem,
            "Write attention_factor too, and check the release that serves it.",
            "serving",
        )
    elif given is None and factor > 1:
        problem = (
            f"no attention_factor: it should be 0.1 ln {factor:g} + 1 = {usual:.6g}, and not all programs compute it."
        )
        yield Finding("note", where, problem, f'Write "attention_factor": {usual:.6g}.', "attention-factor")
    elif _is_number(given) and abs(given - usual) > 1e-3:
        problem = (
            f"attention_factor is {given:g}, not 0.1 ln {factor:g} + 1 = {usual:.6g}: vLLM before September 2026 and "
        )
        problem += "TGI take the latter or 1."
        yield Finding("warning", where, problem, "Check the release that serves it.", "attention-factor")


def _original(config: dict[str, Any], rope: dict[str, Any]) -> Any:
    return rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
