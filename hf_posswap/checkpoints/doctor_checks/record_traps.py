"""Traps in the record of a swap: what it says against what the config and the weights say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hf_posswap.checkpoints.doctor_checks.findings import Finding
from hf_posswap.checkpoints.doctor_checks.reading import Chart
from hf_posswap.errors import RecordError
from hf_posswap.patching.edits.settings import EditConfig
from hf_posswap.patching.inspect.bounds import bounds_by, within
from hf_posswap.patching.inspect.describe import model_class_of
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.refusals import POSSWAP_MODEL_TYPE, read
from hf_posswap.utils.auto_classes import refuse_endless_lists

_WHERE = "config.json: posswap"


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


def _against_config(record: SwapRecord, config: dict[str, Any], chart: Chart) -> Iterator[Finding]:
    """Yield config values that differ from what the recorded swap writes."""
    from transformers import CONFIG_MAPPING

    if record.base_type not in CONFIG_MAPPING:
        problem = f"base_type {record.base_type!r} is not a model type of this transformers."
        yield Finding("error", _WHERE, problem, "Use the transformers that the checkpoint was made with.")
        return
    try:
        refuse_endless_lists(chart.source, config)
        native: Any = CONFIG_MAPPING[record.base_type].from_dict(
            {key: value for key, value in read(config).items() if key != "posswap"}
            | {"model_type": record.base_type}
            | record.original
        )
        with within(bounds_by(chart.shapes, native), native), torch.device("meta"):
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


def _differing(name: str, expected: Any, config: dict[str, Any]) -> Iterator[Finding]:
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
