"""Settings of a config that have no effect, lengths that do not fit, and what others read in it.

The config.json, as it stands on disk, is held against the config that was loaded from it, and against the JSON that
serving programs want.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.doctor_findings import Diagnosis, Finding
from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.exports.rules import Judgement, filled, is_known, judge
from hf_posswap.families.modules import get
from hf_posswap.families.rope_config import BY_TYPE, RopeSettings, config_at, config_parts, rope_settings
from hf_posswap.families.sites import Sites, TokenTable
from hf_posswap.inspection.checking.angles import RotarySet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

THETAS = ("rope_theta", "rotary_emb_base", "rope_base", "rotary_base", "rope_freq_base")
"""Names under which configs have carried the one theta of a model."""
_SETTINGS = ("rope_parameters", "rope_scaling")
_INNER = ("text_config", "llm_config", "language_config")
"""Names under which composed configs have carried their language model's."""
_SPELLED = {"su": "longrope"}
_NO_SCALING = ("default", "mrope")
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_SCALING = frozenset.union(*BY_TYPE.values()) - {"original_max_position_embeddings"}
_KNOWN = _COMMON.union(*BY_TYPE.values())
SERVERS = ("vllm", "sglang", "llamacpp", "tgi")
"""The serving programs that compute positions by themselves."""
_USUAL_THETA = 10000.0
"""What programs take where they read none."""


def scaling_findings(sets: list[RotarySet]) -> Iterator[Finding]:
    """Yield scalings that change no angle at any length."""
    seen: list[RopeSettings] = []
    for each in sets:
        rope, values = each.rope, each.rope.values
        where = f"config: rope_parameters{f'.{each.name}' if each.name else ''}"
        if rope.rope_type in ("default", "proportional") or rope in seen:
            continue
        seen.append(rope)
        lists = [name for name in ("short_factor", "long_factor") if isinstance(values.get(name), (list, tuple))]
        pairs = each.actual.shape[-1]
        wrong = [f"{name} has {len(values[name])}" for name in lists if len(values[name]) != pairs]
        if wrong:
            yield Finding(
                "error", where, f"{' and '.join(wrong)} values, and the model has {pairs} angles: one value is spread "
                "over all of them, other numbers fail.", "Write one value for each angle.", "scaling-factor",
            )  # fmt: skip
        elif _changes_nothing(rope, pairs):
            yield Finding(
                "warning", where, f"rope type {rope.rope_type!r} changes no angle at any length with these values: it "
                f"has no effect ({_values(values)}).",
                "Write the factor, target length over original length, and original_max_position_embeddings, the "
                "length of the pretraining; or remove the scaling.", "scaling-noop",
            )  # fmt: skip


def late_scaling(model: PreTrainedModel, longest: object) -> Iterator[Finding]:
    """Yield a dynamic scaling that no text reaches, because the tokenizer cuts it before.

    Args:
        model: the model.
        longest: model_max_length of its tokenizer; None: there is none.
    """
    sets = rope_settings(model.config.get_text_config())
    dynamic = next((each for each in sets if each.rope_type == "dynamic" and each.values.get("factor")), None)
    if dynamic is None or not dynamic.length:
        return
    if isinstance(longest, (int, float)) and longest <= dynamic.length:
        yield Finding(
            "warning", "config: rope_parameters", "rope type 'dynamic' scales beyond max_position_embeddings, "
            f"{dynamic.length}, and the tokenizer cuts texts at {longest:g}: it has no effect.",
            "Set the tokenizer's model_max_length to the length that you want, e.g. "
            f"{round(dynamic.factor * dynamic.length)}.", "scaling-noop",
        )  # fmt: skip


def _changes_nothing(rope: RopeSettings, pairs: int) -> bool:
    try:
        plain = RopeSettings({"rope_theta": rope.values["rope_theta"]}).angles(2 * pairs)
        scaled = [rope.angles(2 * pairs, length) for length in (0, 64 * max(rope.length, 1))]
        if rope.attention_factor != 1.0:
            return False
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return False
    return all(bool((angles - plain).abs().max() <= 1e-6 * plain.max()) for angles in scaled)


def _values(rope: Mapping[str, object]) -> str:
    names = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    return ", ".join(f"{name} {rope[name]}" for name in names if name in rope) or "no factor"


def theta_findings(model: PreTrainedModel, sets: list[RotarySet]) -> Iterator[Finding]:
    """Yield thetas of a live config that nothing reads, and thetas that are null."""
    for path, config in config_parts(model.config).items():
        inside = [layer.values.get("rope_theta") for layer in rope_settings(config)]
        where = f"config{f'.{path}' if path else ''}"
        fields = getattr(type(config), "__dataclass_fields__", {})
        for name in THETAS if inside else ():
            value = vars(config).get(name)
            if isinstance(value, (int, float)) and value not in inside and sets and name not in fields:
                yield Finding(
                    "error", f"{where}.{name}", f"it is {value:g}, and rope_parameters has {listed(inside)}: "
                    f"transformers 5 reads only rope_parameters, so {name} has no effect.",
                    f'Write config.rope_parameters["rope_theta"] = {value:g} before the model is built, if that is '
                    "the theta it was trained with.", "theta-ignored",
                )  # fmt: skip


def listed(values: Sequence[float | None]) -> str:
    """Return numbers as text, each once."""
    texts = [f"{value:g}" if isinstance(value, (int, float)) else str(value) for value in values]
    return " and ".join(dict.fromkeys(texts))


def table_findings(model: PreTrainedModel, sites: Sites | None) -> Iterator[Finding]:
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


def length_raised(model: PreTrainedModel, sets: list[RotarySet], trained: int | None) -> Iterator[Finding]:
    """Yield a max_position_embeddings that was raised while the angles stayed those of plain RoPE.

    Args:
        model: the model.
        sets: its sets of angles.
        trained: the length in the config.json that it was loaded from, if that is known.
    """
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    original = getattr(config, "original_max_position_embeddings", None) or trained
    ropes = [each.rope for each in sets if each.rope.values]
    if not isinstance(most, int) or not isinstance(original, int) or most <= original or not ropes:
        return
    if all(rope.rope_type == "default" for rope in ropes):
        yield Finding(
            "warning", "config.max_position_embeddings", f"it is {most}, and the model was made for {original}: no "
            "scaling is set, so the positions beyond are ones that it never saw.",
            f'Set a scaling, e.g. hf_posswap.patch_model(model, "yarn", factor={most / original:g}), or leave it at '
            f"{original}.", "length-raised",
        )  # fmt: skip


def generation_findings(model: PreTrainedModel, sites: Sites | None) -> Iterator[Finding]:
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


def lost_findings(raw: dict[str, object], config: Any) -> Iterator[Finding]:
    """Yield thetas and scalings of config.json that are not in the config loaded from it.

    Args:
        raw: the content of config.json.
        config: the config of the model.
    """
    inner = {name: value for name, value in raw.items() if isinstance(value, dict) and name not in _SETTINGS}
    text = config.get_text_config()
    layered_config = config if rope_settings(config) else text
    yield from _lost(raw, layered_config, "config.json")
    for name, values in inner.items():
        loaded = getattr(config, name, None)
        if hasattr(loaded, "to_dict"):
            yield from _lost(values, loaded, f"config.json: {name}")
        elif name in _INNER:
            yield from _lost(values, text, f"config.json: {name}")


def _lost(raw: dict[str, Any], config: Any, where: str) -> Iterator[Finding]:
    """Yield what one config on disk says about rope, and the loaded one does not."""
    layers = rope_settings(config)
    if not layers:
        return
    thetas = [layer.values.get("rope_theta") for layer in layers]
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


def _lost_theta(where: str, value: float, thetas: Sequence[float | None], config: PreTrainedConfig) -> Finding:
    loaded = " and ".join(
        dict.fromkeys(f"{theta:g}" if isinstance(theta, (int, float)) else "null" for theta in thetas)
    )
    return Finding(
        "error", where, f"it is {value:g} on disk, and the model computes with theta {loaded}: {type(config).__name__} "
        "does not take it from there, and the model reads its weights by other angles.",
        f'Write "rope_parameters": {{"rope_type": "default", "rope_theta": {value:g}}} into config.json (with the '
        "scaling's own keys, if there is one), and remove the old keys.", "theta-lost",
    )  # fmt: skip


def _lost_scaling(
    where: str, setting: dict[str, object], layers: tuple[RopeSettings, ...], config: PreTrainedConfig
) -> Iterator[Finding]:
    """Yield a scaling on disk of which the loaded config has another type, or other values."""
    if any(isinstance(value, dict) for value in setting.values()):
        return
    rope_type = RopeSettings(setting).rope_type
    rope_type = _SPELLED.get(rope_type, rope_type)
    if rope_type in _NO_SCALING:
        return
    same = [layer for layer in layers if layer.rope_type == rope_type]
    keys = BY_TYPE.get(rope_type, frozenset()) & setting.keys()
    agree = [layer for layer in same if all(layer.values.get(key) == setting[key] for key in keys)]
    if not agree:
        loaded = " and ".join(dict.fromkeys(layer.rope_type for layer in layers))
        problem = f"it is {rope_type!r} on disk, and the model computes with rope type {loaded}" if not same else (
            f"its values are not those of the loaded rope type {rope_type!r}"
        )  # fmt: skip
        yield Finding(
            "error", where, f"{problem}: {type(config).__name__} does not take them from there.",
            "Write them to rope_parameters in config.json, with rope_type and rope_theta, and remove the old keys.",
            "scaling-lost",
        )  # fmt: skip


def key_findings(config: PreTrainedConfig) -> Iterator[Finding]:
    """Yield keys of rope parameters that have no effect: those of another rope type, and misspelled ones."""
    for path, sub_config in config_parts(config).items():
        ignored = set(getattr(sub_config, "ignore_keys_at_rope_validation", None) or ())
        for rope in rope_settings(sub_config):
            where = ".".join(filter(None, ["config", path, "rope_parameters", rope.layer_type]))
            yield from _keys(rope, where, ignored)


def _keys(rope: RopeSettings, where: str, ignored: set[str]) -> Iterator[Finding]:
    rope_type = rope.rope_type
    for key, value in rope.values.items() if rope_type in BY_TYPE else ():
        if value is None or key in ignored | _COMMON | BY_TYPE[rope_type]:
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


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]}..."


def serving_findings(config: PreTrainedConfig, diagnosis: Diagnosis | None = None) -> Iterator[Finding]:
    """Yield the programs that compute other positions than transformers, and those that want other keys.

    Args:
        config: of the model.
        diagnosis: of its checkpoint, whose commands are then named; None: it is a live model.

    Raises:
        PosswapError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError: no family, no length, or values
            that fail.
    """
    positions = position_config_of(config)
    is_plain = positions.kind == "table" or positions.kind == "rope" and positions.rope_type == "default"
    if not positions.generates:
        return
    source = "DIR" if diagnosis is None else diagnosis.source
    served = {} if diagnosis is None else {each.target: each for each in diagnosis.serving}
    for target in SERVERS:
        if not is_known(target, positions):
            continue
        judged = judge(target, positions)
        known = served.get(target)
        verdict: str = judged.verdict
        why, engine = judged.why, judged.claim.source
        command = filled(judged.claim.command, positions, source)
        if known is not None:
            verdict, why, command = known.verdict, known.why, known.command
        if verdict != "exact" and is_plain:
            continue  # the program lacks the class, whatever its positions
        if verdict != "exact":
            what = "does not compute these positions" if verdict == "impossible" else "computes them roughly"
            do = f"Run: {command}" if command else "Serve it with another program."
            yield Finding("note", target, f"{target} ({engine}) {what}: {why}", do, "serving")
            continue
        if command.startswith("llama-server"):
            continue  # it reads the GGUF file that was given, and no config.json
        wanted = _wanted(judged, positions, config)
        if wanted:
            yield Finding(
                "note", target, f"{target} ({engine}) computes these positions if config.json has "
                f"{json.dumps(wanted)}.",
                f"Write that, or run: posswap export {source} --target {target} -o "
                f"{'model.gguf' if target == 'llamacpp' else 'OUT'}", "serving",
            )  # fmt: skip


def _wanted(judged: Judgement, positions: PositionConfig, config: PreTrainedConfig) -> dict[str, object]:
    """Return the keys that a program wants and the config lacks or has otherwise; {}: its defaults are the same."""
    if positions.rope_type == "default" and positions.rope.get("rope_theta", _USUAL_THETA) == _USUAL_THETA:
        return {}
    values = config.to_dict()
    rope = {key: value for key, value in judged.spelling.rope.items() if not _same(positions.rope.get(key), value)}
    outer = {key: value for key, value in judged.spelling.config.items() if not _same(values.get(key), value)}
    return outer | ({"rope_parameters": rope} if rope else {})


def _same(has: object, wanted: object) -> bool:
    if isinstance(has, float) and isinstance(wanted, float):
        return abs(has - wanted) < 1e-6 * abs(wanted)
    return bool(has == wanted)
