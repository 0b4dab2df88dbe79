"""`doctor`: all checks, in order."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_posswap.checkpoints.doctor_checks.findings import Diagnosis, Finding, Serving, worst_first
from hf_posswap.checkpoints.doctor_checks.model_traps import (
    Layout,
    lay_out,
    length_findings,
    number_findings,
    readable,
    setting_findings,
    weight_findings,
)
from hf_posswap.checkpoints.doctor_checks.reading import Chart, read_chart
from hf_posswap.checkpoints.doctor_checks.record_traps import adapter_findings, record_findings
from hf_posswap.checkpoints.doctor_checks.rope_traps import rope_findings
from hf_posswap.checkpoints.exports.claims_table import CLAIMS, filled, is_known
from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.exports.rules import judge
from hf_posswap.checkpoints.native.suggesting import RUN_PLUGINS, stock_config
from hf_posswap.errors import CheckpointError, RecordError, UnsupportedModelError
from hf_posswap.families.rope_config import inv_freq_names
from hf_posswap.utils.auto_classes import TRUST
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.threads import quiet_logger


def doctor(source: str | Path, *, trust_remote_code: bool = False, **hub: Any) -> Diagnosis:
    """Return the known position traps of a checkpoint, made by hf_posswap or by anyone. No weights are loaded.

    It reads config.json, the names and shapes in the headers of safetensors files, the tokenizer's settings and an
    adapter's sidecar, and builds the model of the config on the meta device.

    Args:
        source: a folder, a Hub id or a GGUF file. Of a Hub id, the small files are downloaded, and the first bytes of
            the weights are read.
        trust_remote_code: run code of the checkpoint, where its config needs that; without it, such a config is a
            finding.
        hub: revision, token, cache_dir, local_files_only for a Hub id.

    Raises:
        CheckpointError: there is nothing readable.

    Example:
        >>> import json, tempfile
        >>> from transformers import LlamaConfig
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11).to_dict()
        ...     yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
        ...     _ = (Path(folder) / "config.json").write_text(json.dumps(config | {"rope_parameters": yarn}))
        ...     doctor(folder).findings[0].what[:51]
        'yarn without original_max_position_embeddings: tran'
    """
    return diagnose(read_chart(checkpoint_of(source, **hub), **hub), trust_remote_code=trust_remote_code, **hub)


def diagnose(chart: Chart, *, trust_remote_code: bool = False, **hub: Any) -> Diagnosis:
    """Return what `doctor` does of a checkpoint whose files were read."""
    findings = list(adapter_findings(chart))
    checked = ["adapter_config.json"] if chart.adapter is not None else []
    positions = "an adapter"
    serving: tuple[Serving, ...] = ()
    if chart.config is not None:
        positions, model_findings, model_checks, serving = _of_model(chart, hub | {TRUST: trust_remote_code})
        findings += model_findings
        checked += model_checks
    return Diagnosis(chart.source, positions, worst_first(findings), tuple(checked), serving)


def _of_model(chart: Chart, hub: dict[str, Any]) -> tuple[str, list[Finding], list[str], tuple[Serving, ...]]:
    """Return the mechanism as text, the findings, the checks, and the verdicts of serving programs."""
    assert chart.config is not None
    checked = ["config.json"]
    findings = config_findings(chart.config)
    with _quiet():
        findings += record_findings(chart)
        layout = (
            None if any("posswap" in f.where and f.severity == "error" for f in findings) else lay_out(chart, **hub)
        )
    unset = [finding for finding in findings if finding.code == "theta-null"]
    if isinstance(layout, Finding) and not unset:  # otherwise that is why none can be built
        findings.append(layout)
    if isinstance(layout, Layout):
        if not any(inv_freq_names(module) for module in layout.model.modules()):
            findings = [finding for finding in findings if finding not in unset]  # nothing reads it
        findings += [*setting_findings(layout, chart), *length_findings(layout, chart)]
        if chart.shapes is not None:
            checked.append(f"the shapes of {len(chart.shapes)} weights")
            findings += [*weight_findings(layout, chart.shapes), *number_findings(layout, chart)]
    if chart.tokenizer is not None:
        checked.append("tokenizer_config.json")
    unread = readable(chart)
    all_findings = [*findings, *([unread] if unread else [])]
    return _positions(chart, layout), all_findings, checked, _serving(chart, layout)


def _serving(chart: Chart, layout: Any) -> tuple[Serving, ...]:
    """Return how each program runs the checkpoint; () where its positions are unknown."""
    if not isinstance(layout, Layout) or layout.sites is None:
        return ()
    try:
        position_config = position_config_of(layout.model.config)
    except (UnsupportedModelError, RecordError, CheckpointError):
        return ()
    stock = stock_config(layout.model) if position_config.kind == "plugin" else None
    known = [target for target in CLAIMS if is_known(target, position_config)]
    return tuple(_served(target, position_config, stock, chart.source) for target in known)


def _served(
    target: str, position_config: PositionConfig, stock: tuple[PositionConfig, str] | None, source: str
) -> Serving:
    """Return how the program `target` runs the checkpoint, or else the stock model that `to_native` makes of it."""
    direct = judge(target, position_config)
    if stock is not None and direct.verdict == "impossible" and target not in RUN_PLUGINS:
        config, name = stock
        converted = judge(target, config) if is_known(target, config) else direct
        if converted.verdict != "impossible":
            folder = shlex.quote(f"{source.rstrip('/')}-stock")
            commands = (
                f"posswap to-native {shlex.quote(source)} -o {folder} && posswap export {folder} --target {target}"
            )
            why = f"as a {name} by posswap to-native: {converted.why}"
            return Serving(target, converted.verdict, why, commands, converted.claim.source, name)
    command = filled(direct.claim.command, position_config, source)
    return Serving(target, direct.verdict, direct.why, command, direct.claim.source)


def config_findings(config: dict[str, Any], where: str = "config.json") -> list[Finding]:
    """Return the problems in the rope settings of a config and of the configs inside it."""
    return [finding for location, each in _configs(config, where) for finding in rope_findings(each, location)]


def _configs(config: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `config` and the configs inside it (text_config, ...), each with its location."""
    yield where, config
    for name, inner_config in config.items():
        if isinstance(inner_config, dict) and "model_type" in inner_config:
            yield f"{where}: {name}", inner_config


def _positions(chart: Chart, layout: Any) -> str:
    """Return the mechanism of a checkpoint as text."""
    from hf_posswap.patching.inspect.describe import describe_positions

    if not isinstance(layout, Layout) or layout.sites is None:
        model_type = (chart.config or {}).get("model_type", "unknown")
        built = isinstance(layout, Layout)
        why = "whose positions no family of hf_posswap describes" if built else "of which no model can be built"
        return f"model type {model_type}, {why}"
    report = describe_positions(layout.model)
    record = (chart.config or {}).get("posswap")
    swapped = report.swapped or (record["scheme"]["name"] if isinstance(record, dict) else None)
    return f"{report.model}, {report.native}" + (f", swapped to {swapped}" if swapped else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' log inside the block: the findings replace it."""
    with quiet_logger("transformers", logging.CRITICAL):
        yield
