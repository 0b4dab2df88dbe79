"""Settings of a config that have no effect, and lengths that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_posswap.checking.angles import RotarySet
from hf_posswap.checking.formulas import rope_angles, rope_type_of
from hf_posswap.checkpoints.doctor_findings import Finding
from hf_posswap.families.modules import get
from hf_posswap.families.rope_config import config_at, config_parts
from hf_posswap.families.sites import Sites, TokenTable

THETAS = ("rope_theta", "rotary_emb_base", "rope_base", "rotary_base", "rope_freq_base")
"""Names under which configs have carried the one theta of a model."""


def scaling_findings(sets: list[RotarySet]) -> Iterator[Finding]:
    """Yield scalings that change no angle at any length."""
    seen: list[tuple[dict[str, Any], str]] = []
    for each in sets:
        rope_type = rope_type_of(each.rope)
        where = f"config: rope_parameters{f'.{each.name}' if each.name else ''}"
        if rope_type in ("default", "proportional") or (each.rope, where) in seen:
            continue
        seen.append((each.rope, where))
        lists = [name for name in ("short_factor", "long_factor") if isinstance(each.rope.get(name), (list, tuple))]
        pairs = each.actual.shape[-1]
        wrong = [f"{name} has {len(each.rope[name])}" for name in lists if len(each.rope[name]) != pairs]
        if wrong:
            yield Finding(
                "error", where, f"{' and '.join(wrong)} values, and the model has {pairs} angles: one value is spread "
                "over all of them, other numbers fail.", "Write one value for each angle.", "scaling-factor",
            )  # fmt: skip
        elif _changes_nothing(each, pairs):
            yield Finding(
                "warning", where, f"rope type {rope_type!r} changes no angle at any length with these values: it has "
                f"no effect ({_values(each.rope)}).",
                "Write the factor, target length over original length, and original_max_position_embeddings, the "
                "length of the pretraining; or remove the scaling.", "scaling-noop",
            )  # fmt: skip


def late_scaling(model: Any, longest: Any) -> Iterator[Finding]:
    """Yield a dynamic scaling that no text reaches, because the tokenizer cuts it before.

    Args:
        model: the model.
        longest: model_max_length of its tokenizer; None: there is none.
    """
    config = model.config.get_text_config()
    rope, most = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)
    if not isinstance(rope, dict) or rope_type_of(rope) != "dynamic" or not (rope.get("factor") and most):
        return
    if isinstance(longest, (int, float)) and longest <= most:
        yield Finding(
            "warning", "config: rope_parameters", f"rope type 'dynamic' scales beyond max_position_embeddings, {most}, "
            f"and the tokenizer cuts texts at {longest:g}: it has no effect.",
            f"Set the tokenizer's model_max_length to the length that you want, e.g. {round(rope['factor'] * most)}.",
            "scaling-noop",
        )  # fmt: skip


def _changes_nothing(each: RotarySet, pairs: int) -> bool:
    far = 64 * max(each.length, 1)
    try:
        plain = rope_angles({"rope_theta": each.rope["rope_theta"]}, 2 * pairs, each.length)[0]
        scaled = [rope_angles(each.rope, 2 * pairs, each.length, length) for length in (0, far)]
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return False
    return all(factor == 1.0 and bool((angles - plain).abs().max() <= 1e-6 * plain.max()) for angles, factor in scaled)


def _values(rope: dict[str, Any]) -> str:
    names = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    return ", ".join(f"{name} {rope[name]}" for name in names if name in rope) or "no factor"


def theta_findings(model: Any, sets: list[RotarySet]) -> Iterator[Finding]:
    """Yield thetas of a live config that nothing reads, and thetas that are null."""
    for path, config in config_parts(model.config).items():
        rope = getattr(config, "rope_parameters", None)
        if not isinstance(rope, dict) or not rope:
            continue
        where = f"config{f'.{path}' if path else ''}"
        layers = [value for value in rope.values() if isinstance(value, dict)] or [rope]
        for name in THETAS:
            value = vars(config).get(name)
            inside = [layer.get("rope_theta") for layer in layers]
            if isinstance(value, (int, float)) and value not in inside and sets and not _is_field(config, name):
                yield Finding(
                    "error", f"{where}.{name}", f"it is {value:g}, and rope_parameters has {listed(inside)}: "
                    f"transformers 5 reads only rope_parameters, so {name} has no effect.",
                    f'Write config.rope_parameters["rope_theta"] = {value:g} before the model is built, if that is '
                    "the theta it was trained with.", "theta-ignored",
                )  # fmt: skip


def _is_field(config: Any, name: str) -> bool:
    return name in getattr(type(config), "__dataclass_fields__", {})


def listed(values: list[Any]) -> str:
    """Return numbers as text, each once."""
    texts = [f"{value:g}" if isinstance(value, (int, float)) else str(value) for value in values]
    return " and ".join(dict.fromkeys(texts))


def table_findings(model: Any, sites: Sites | None) -> Iterator[Finding]:
    """Yield position tables with fewer rows than the config has positions."""
    for stack in () if sites is None else sites.stacks:
        if not isinstance(stack.table, TokenTable) or stack.config_name is None:
            continue
        weight = getattr(get(model, stack.table.path), "weight", None)
        path, _, name = stack.config_name.rpartition(".")
        length = getattr(config_at(model.config, path), name, None)
        if weight is None or weight.dim() != 2 or not isinstance(length, int):
            continue
        rows = weight.shape[0] - stack.table.offset
        if stack.config_length(rows) < length:
            yield Finding(
                "error", f"config.{stack.config_name}", f"it is {length}, and {stack.table.path} has rows for {rows} "
                "positions: longer texts are an error, or read other rows.",
                f"Set it to {stack.config_length(rows)}, or lengthen the table: hf_posswap.patch_model(model, "
                f"'learned', max_length={length}).", "length-table",
            )  # fmt: skip


def length_raised(model: Any, sets: list[RotarySet], trained: int | None) -> Iterator[Finding]:
    """Yield a max_position_embeddings that was raised while the angles stayed those of plain RoPE.

    Args:
        model: the model.
        sets: its sets of angles.
        trained: the length in the config.json that it was loaded from, if that is known.
    """
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    original = getattr(config, "original_max_position_embeddings", None) or trained
    ropes = [each.rope for each in sets if each.rope]
    if not isinstance(most, int) or not isinstance(original, int) or most <= original or not ropes:
        return
    if all(rope_type_of(rope) == "default" for rope in ropes):
        yield Finding(
            "warning", "config.max_position_embeddings", f"it is {most}, and the model was made for {original}: no "
            "scaling is set, so the positions beyond are ones that it never saw.",
            f'Set a scaling, e.g. hf_posswap.patch_model(model, "yarn", factor={most / original:g}), or leave it at '
            f"{original}.", "length-raised",
        )  # fmt: skip


def generation_findings(model: Any, sites: Sites | None) -> Iterator[Finding]:
    """Yield a generation_config that generates more tokens than there are positions."""
    generation = getattr(model, "generation_config", None)
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if generation is None or not isinstance(window, int):
        return
    has_table = sites is not None and sites.table_path is not None and not hasattr(model, "_posswap")
    for name in ("max_length", "max_new_tokens"):
        value = getattr(generation, name, None)
        if isinstance(value, int) and value > window:
            beyond = "an error at the end of the table" if has_table else "positions that the model was not made for"
            yield Finding(
                "warning" if has_table else "note", f"generation_config.{name}", f"it is {value}, and the model has "
                f"{window} positions: beyond them comes {beyond}.", f"Set it to {window}, or extend the model.",
                "generation-length",
            )  # fmt: skip
