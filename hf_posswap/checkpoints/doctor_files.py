"""The files of a checkpoint as the doctor reads them, and the traps that they show by themselves.

Those are in the rope settings of its configs, in the record of a swap, and in what goes with an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.doctor_findings import Finding
from hf_posswap.compat.transformers_loading import file_of
from hf_posswap.compat.transformers_models import building_on_meta
from hf_posswap.errors import CheckpointError, RecordError
from hf_posswap.families.rope_config import BY_TYPE, FOLLOW_LENGTH, SCALED, RopeSettings
from hf_posswap.patching.edits.settings import EditConfig
from hf_posswap.patching.inspect.describe import model_class_of
from hf_posswap.patching.inspect.untrusted_config import bounds_by, within
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.refusals import POSSWAP_MODEL_TYPE, POSSWAP_ROPE_TYPE, read
from hf_posswap.rope_math import temperature
from hf_posswap.utils.auto_classes import refuse_endless_lists
from hf_posswap.utils.format import is_number
from hf_posswap.utils.hub_session import why_not_found
from hf_posswap.utils.untrusted import read_bounded_json
from hf_posswap.utils.weight_shapes import Shapes, folder_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping

_FROM_ORIGINAL = ("yarn", "longrope", "llama3")
_SETTINGS = ("rope_parameters", "rope_scaling")
_WHERE = "config.json: posswap"


@dataclass(frozen=True)
class Chart:
    """What lies in a checkpoint.

    Attributes:
        source: the folder or Hub id.
        config: config.json, as it stands there; None where there is none.
        adapter: adapter_config.json, or None.
        sidecar: posswap.json, or None.
        tokenizer: tokenizer_config.json, or None.
        shapes: of the weights, by name; None where there are none that can be read.
    """

    source: str
    config: dict[str, Any] | None
    adapter: dict[str, object] | None
    sidecar: dict[str, object] | None
    tokenizer: dict[str, object] | None
    shapes: Shapes | None


def read_chart(source: str | Path, **hub: object) -> Chart:
    """Return what lies in the checkpoint at `source`, a folder or a Hub id; no weight is read.

    Args:
        source: the folder or Hub id.
        hub: revision, token, cache_dir, local_files_only for a Hub id.

    Raises:
        CheckpointError: neither a config.json nor an adapter_config.json is there, or a file cannot be read.
    """
    names = ("config.json", "adapter_config.json", "posswap.json", "tokenizer_config.json")
    config, adapter, sidecar, tokenizer = (read_json_of(source, name, **hub) for name in names)
    if config is None and adapter is None:
        sought = f": {reason}" if (reason := why_not_found(source)) else "."
        raise CheckpointError(f"{str(source)!r} holds neither a config.json nor an adapter_config.json{sought}")
    shapes = None
    if config is not None:
        shapes = folder_shapes(Path(source)) if Path(source).is_dir() else _shapes_on_hub(str(source), hub)
    return Chart(str(source), config, adapter, sidecar, tokenizer, shapes)


def read_json_of(source: str | Path, name: str, **hub: Any) -> dict[str, object] | None:
    """Return the object in the JSON file `name` of a folder or Hub id; None where there is no such file.

    Raises:
        CheckpointError: it cannot be read, or holds no object.
    """
    folder = Path(source)
    if folder.is_dir() and not (folder / name).is_file():
        return None
    try:
        path = folder / name if folder.is_dir() else file_of(source, name, **hub)
        if path is None:
            return None
        value = read_bounded_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {name} of {str(source)!r}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} of {str(source)!r} must hold an object, got {type(value).__name__}.")
    return value


def _shapes_on_hub(source: str, hub: dict[str, Any]) -> Shapes | None:
    """Return the shapes of weights on the Hub, from the first bytes of each file; None where that does not work."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    known = {name: hub[name] for name in ("revision", "token") if name in hub}
    try:
        files = get_safetensors_metadata(source, **known).files_metadata.values()
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError, OSError, ValueError):
        return None
    return {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}


def rope_findings(config: Mapping[str, object], where: str = "config.json") -> Iterator[Finding]:
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


def _of_one(config: Mapping[str, object], rope: dict[str, object], where: str) -> Iterator[Finding]:
    rope_kind = RopeSettings(rope).rope_type
    if "type" in rope and "rope_type" in rope and rope["type"] != rope["rope_type"]:
        problem = f"type is {rope['type']!r} and rope_type {rope['rope_type']!r}: programs differ in which they read."
        yield Finding("error", where, problem, "Keep only rope_type.", "rope-type-twice")
    if rope_kind not in (*BY_TYPE, POSSWAP_ROPE_TYPE, "su"):
        problem = f"rope type {rope_kind!r} is not one of transformers': {', '.join(BY_TYPE)}."
        yield Finding("note", where, problem, "Only a class that defines this type can load it.", "rope-type")
    if rope_kind == POSSWAP_ROPE_TYPE:
        return
    yield from _theta(config, rope, where)
    if rope_kind in SCALED and rope_kind != "proportional":
        yield from _factor(config, rope, rope_kind, where)
    if rope_kind in _FROM_ORIGINAL or rope_kind == "dynamic":
        yield from _lengths(config, rope, rope_kind, where)
    if rope_kind == "yarn":
        yield from _yarn(rope, where)
    if rope_kind in FOLLOW_LENGTH:
        problem = f"{rope_kind} follows the length: with a cache, a text that grows beyond the original length is not "
        problem += "computed as one forward would."
        yield Finding(
            "note", where, problem, "Compare lengths by whole forwards, or use yarn or llama3.", "scaling-by-length"
        )


def _spelled_anew(settings: object) -> object:
    """Return rope settings with their type only under its new name."""
    if not isinstance(settings, dict):
        return settings
    return {k: v for k, v in settings.items() if k != "type"} | {"rope_type": RopeSettings(settings).rope_type}


def _theta(config: Mapping[str, object], rope: Mapping[str, object], where: str) -> Iterator[Finding]:
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
    if value is not None and not (is_number(value) and value > 1):
        yield Finding(
            "error",
            where,
            f"rope_theta is {value!r}, not a number above 1.",
            "Write the base of the model.",
            "theta-value",
        )


def _null_theta(config: Mapping[str, object], rope: Mapping[str, object], where: str) -> Iterator[Finding]:
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


def _factor(config: Mapping[str, object], rope: Mapping[str, object], type_name: str, where: str) -> Iterator[Finding]:
    factor = rope.get("factor")
    if factor is None and type_name == "longrope" and _original(config, rope):
        return
    if not is_number(factor) or factor < 1:
        problem = f"{type_name} needs a factor >= 1, got {factor!r}."
        yield Finding("error", where, problem, "Write target length over original length.", "scaling-factor")


def _lengths(config: Mapping[str, object], rope: Mapping[str, object], type_name: str, where: str) -> Iterator[Finding]:
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
    if not (is_number(original) and original > 0 and is_number(most) and is_number(factor)):
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


def _yarn(rope: Mapping[str, object], where: str) -> Iterator[Finding]:
    factor, given = rope.get("factor"), rope.get("attention_factor")
    scales = [rope.get(name) is not None for name in ("mscale", "mscale_all_dim")]
    if any(scales) and not all(scales) and given is None:
        problem = "mscale and mscale_all_dim act together, and one of them is missing: programs differ in what they do."
        yield Finding("warning", where, problem, "Write attention_factor itself.", "attention-factor")
    if not is_number(factor) or factor < 1:
        return
    usual = temperature(factor)
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
    elif is_number(given) and abs(given - usual) > 1e-3:
        problem = (
            f"attention_factor is {given:g}, not 0.1 ln {factor:g} + 1 = {usual:.6g}: vLLM before September 2026 and "
        )
        problem += "TGI take the latter or 1."
        yield Finding("warning", where, problem, "Check the release that serves it.", "attention-factor")


def _original(config: Mapping[str, object], rope: Mapping[str, object]) -> object:
    return rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))


def record_findings(chart: Chart) -> Iterator[Finding]:
    """Yield problems in the record of a checkpoint's config.json; nothing where there is no record and needs none."""
    config = chart.config or {}
    model_type = config.get("model_type")
    if "posswap" not in config:
        if model_type == POSSWAP_MODEL_TYPE:
            problem = "model_type is posswap, and the record of the swap is missing."
            yield Finding("error", "config.json", problem, "Take config.json from the original checkpoint.")
        return
    try:
        record = SwapRecord.from_dict(config["posswap"])
    except RecordError as error:
        advice = error.advice or "Take config.json from the original checkpoint."
        yield Finding("error", _WHERE, error.problem, advice)
        return
    due = POSSWAP_MODEL_TYPE if record.route == "plugin" else record.base_type
    if model_type != due:
        problem = f"model_type is {model_type!r}, and a {record.route} swap of {record.base_type} has {due!r}: "
        problem += "the mechanism would be lost silently." if record.route == "plugin" else "it would not load."
        yield Finding("error", "config.json", problem, f"Write model_type: {due}.")
        return
    yield from _against_config(record, config, chart)


def _against_config(record: SwapRecord, config: dict[str, object], chart: Chart) -> Iterator[Finding]:
    """Yield config values that differ from what the recorded swap writes."""
    from transformers import CONFIG_MAPPING

    if record.base_type not in CONFIG_MAPPING:
        problem = f"base_type {record.base_type!r} is not a model type of this transformers."
        advice = (
            "Use the transformers that the checkpoint was made with. For a model type of your own, first import the "
            "module that registers it (--import)."
        )
        yield Finding("error", _WHERE, problem, advice)
        return
    try:
        refuse_endless_lists(chart.source, config)
        native = CONFIG_MAPPING[record.base_type].from_dict(
            {key: value for key, value in read(config).items() if key != "posswap"}
            | {"model_type": record.base_type}
            | record.original
        )
        with within(bounds_by(chart.shapes, native), native), building_on_meta():
            skeleton = model_class_of(native)(native)
        plan = plan_swap(skeleton, record.choice(), **record.arguments)
    except Exception as error:  # config classes, models and validators may raise anything
        problem = f"the recorded swap cannot be applied to {record.base_type}: {error}"
        yield Finding("error", _WHERE, problem, "Use the versions that the checkpoint was made with.")
        return
    if plan.route != record.route:
        problem = f"it records a {record.route} swap, which would be {plan.route} here."
        yield Finding("error", _WHERE, problem, "Use the transformers that the checkpoint was made with.")
    values = {edit.path: edit.value for edit in plan.edits if isinstance(edit, EditConfig)}
    for name, original in plan.record.original.items():
        yield from _differing(name, values.get(name, original), config)


def _differing(name: str, expected: object, config: Mapping[str, object]) -> Iterator[Finding]:
    """Yield the finding that the config value `name`, also under an older name, is not the `expected` one."""
    older = {"max_position_embeddings": "n_positions"}
    actual = config.get(name, config.get(older.get(name, name)))
    if isinstance(expected, dict) and isinstance(actual, dict):
        wrong = sorted(key for key in expected if actual.get(key) != expected[key])
        differences = ", ".join(f"{key} is {actual.get(key)!r} instead of {expected[key]!r}" for key in wrong)
    else:
        wrong = [name] if actual != expected else []
        differences = f"it is {actual!r} instead of {expected!r}"
    if wrong:
        problem = f"not what the recorded swap writes: {differences}."
        yield Finding("error", f"config.json: {name}", problem, "Fix it, or patch the base model again.")


def adapter_findings(chart: Chart) -> Iterator[Finding]:
    """Yield problems of a PEFT adapter: its sidecar, and the base that it names."""
    if chart.adapter is None:
        return
    base = chart.adapter.get("base_model_name_or_path")
    if chart.sidecar is None:
        problem = f"without a sidecar ({SIDECAR}) an adapter does not name its base's positions."
        yield Finding(
            "note", "adapter_config.json", problem, "Where the base was swapped, save it with hf_posswap.save."
        )
    else:
        try:
            SwapRecord.from_dict(chart.sidecar.get("record"))
        except RecordError as error:
            yield Finding("error", SIDECAR, error.problem, error.advice or "Take it from the original adapter.")
    if not base:
        problem = "base_model_name_or_path is empty: the adapter does not name its base."
        yield Finding("warning", "adapter_config.json", problem, "Write the base's Hub id there.")
    elif isinstance(base, str) and base.startswith(("/", ".", "~")) and chart.sidecar is None:
        problem = f"the base is a local folder, {base}: other machines will not find it."
        yield Finding("warning", "adapter_config.json", problem, "Write the base's Hub id there.")
