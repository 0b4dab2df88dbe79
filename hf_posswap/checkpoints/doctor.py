"""`doctor`: the known position traps of a checkpoint, found without loading its weights.

The files are checked by themselves; then the model of the config is built on the meta device and compared with the
headers of its weights.
"""

from __future__ import annotations

import copy
import logging
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.checkpoints.doctor_files import Chart, adapter_findings, read_chart, record_findings, rope_findings
from hf_posswap.checkpoints.doctor_findings import Diagnosis, Finding, Serving, worst_first
from hf_posswap.checkpoints.exports.gguf_file import vocabulary_caveat
from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.exports.rules import CLAIMS, filled, is_known, judge
from hf_posswap.checkpoints.native import RUN_PLUGINS, stock_config
from hf_posswap.compat.transformers_models import building_on_meta, unsaved_keys
from hf_posswap.errors import CheckpointError, RecordError, RemoteCodeError, UnsupportedModelError
from hf_posswap.families.locating import locate
from hf_posswap.families.modules import get
from hf_posswap.families.rope_config import RopeSettings, inv_freq_names
from hf_posswap.families.sites import Sites
from hf_posswap.patching.inspect.describe import model_class_of, read_config
from hf_posswap.patching.inspect.untrusted_config import bounds_by, refuse_endless
from hf_posswap.patching.record.model_class import swapped_class
from hf_posswap.patching.record.record import native_config_class
from hf_posswap.utils.atomic_io import read_object
from hf_posswap.utils.auto_classes import TRUST
from hf_posswap.utils.gguf_source import NOTES, checkpoint_of
from hf_posswap.utils.threads import quiet_logger
from hf_posswap.utils.weight_shapes import FLOATS, Shapes, folder_kinds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

_SHOWN = 4


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
    chart = read_chart(checkpoint_of(source, **hub), **hub)
    return diagnose(chart, source, trust_remote_code=trust_remote_code, **hub)


def diagnose(chart: Chart, source: str | Path, *, trust_remote_code: bool = False, **hub: object) -> Diagnosis:
    """Return what `doctor` does of a checkpoint whose files were read.

    Args:
        chart: of its files.
        source: as the user named it; a GGUF file's `chart` is of the folder that it was converted into.
        trust_remote_code: as in `doctor`.
        hub: likewise.
    """
    findings = list(adapter_findings(chart))
    checked = ["adapter_config.json"] if chart.adapter is not None else []
    positions = "an adapter"
    serving: tuple[Serving, ...] = ()
    if chart.config is not None:
        positions, model_findings, model_checks, serving = _of_model(chart, hub | {TRUST: trust_remote_code})
        findings += model_findings
        checked += model_checks
    if str(source) != chart.source:
        serving = tuple(replace(each, command=_of_file(each, str(source), chart.source), caveat="") for each in serving)
    return Diagnosis(str(source), positions, worst_first(findings), tuple(checked), serving)


def _of_file(serving: Serving, source: str, folder: str) -> str:
    """Return the command of `serving` for the GGUF file `source`, which was converted into `folder`.

    hf_posswap takes the file itself, and so does llama.cpp, unless something of it could not be kept.
    """
    steps = serving.command.split(" && ")
    is_whole = Path(source).is_file() and not read_object(Path(folder, NOTES), lost=list)["lost"]
    if serving.caveat:  # the file has the vocabulary
        steps = [steps[-2].replace("vocab.gguf", shlex.quote(source)), steps[-1]]
    if serving.target == "llamacpp" and is_whole and len(steps) == 2 and steps[0].startswith("posswap export"):
        return steps[1].replace("model.gguf", shlex.quote(source))
    steps = [
        step.replace(shlex.quote(folder), shlex.quote(source)) if step.startswith("posswap") else step for step in steps
    ]
    return " && ".join(steps).replace(f"hf_posswap.load({folder!r}", f"hf_posswap.load({source!r}")


def _of_model(chart: Chart, hub: Mapping[str, object]) -> tuple[str, list[Finding], list[str], tuple[Serving, ...]]:
    """Return the mechanism as text, the findings, the checks, and the verdicts of serving programs."""
    assert chart.config is not None
    checked = ["config.json"]
    findings = config_findings(chart.config)
    with quiet_logger("transformers", logging.CRITICAL):  # the findings replace its log
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


def _serving(chart: Chart, layout: object) -> tuple[Serving, ...]:
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
    caveat, command = vocabulary_caveat(source, command) if target == "llamacpp" else ("", command)
    return Serving(target, direct.verdict, direct.why, command, direct.claim.source, caveat=caveat)


def config_findings(config: Mapping[str, object], where: str = "config.json") -> list[Finding]:
    """Return the problems in the rope settings of a config and of the configs inside it."""
    inner = {name: value for name, value in config.items() if isinstance(value, dict) and "model_type" in value}
    located = {where: config, **{f"{where}: {name}": value for name, value in inner.items()}}  # text_config, ...
    return [finding for location, each in located.items() for finding in rope_findings(each, location)]


def _positions(chart: Chart, layout: object) -> str:
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


@dataclass(frozen=True)
class Layout:
    """The model that a config names, on the meta device.

    Attributes:
        model: with its swap, if the config carries one that only hf_posswap runs.
        sites: where its positions are; None where no family describes it.
    """

    model: PreTrainedModel
    sites: Sites | None


def lay_out(chart: Chart, **hub: Any) -> Layout | Finding:
    """Return the model of `chart` on the meta device, or the finding that it cannot be built."""
    try:
        config = read_config(chart.source, **hub)
        config_class = type(config)
        named = model_class_of(config)
        if native_config_class(config) is not config_class:
            named = swapped_class(named)
        refuse_endless(named, config, bounds_by(chart.shapes, config))
        with building_on_meta():
            model = named(copy.deepcopy(config))
    except RemoteCodeError:
        problem = "it cannot be read without running code of the checkpoint: only files were checked."
        return Finding(
            "error", "config.json", problem, "Read that code; then pass --trust-remote-code to look further."
        )
    except Exception as error:  # a class of transformers may raise anything at a bad config
        lines = str(error).strip().splitlines() or [type(error).__name__]
        problem = f"no model can be built from it: {lines[0]}"
        do = "Fix the config, or use the version of transformers (and of hf_posswap) that wrote it."
        return Finding("error", "config.json", problem, do)
    try:
        return Layout(model, locate(model))
    except (UnsupportedModelError, AttributeError, KeyError, TypeError):  # no family describes this model
        return Layout(model, None)


def weight_findings(layout: Layout, shapes: Shapes) -> Iterator[Finding]:
    """Yield position weights that differ from the model's: missing, of another shape, or left over.

    Other weights are not checked: many are renamed, tied or quantized when they are saved.
    """
    model = layout.model
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes_on_disk = shapes if any(name in expected for name in shapes) else _with_other_prefix(shapes, expected, model)
    table = "" if layout.sites is None or layout.sites.table_path is None else f"{layout.sites.table_path}.weight"
    ours = [name for name in expected if name == table or _about_positions(name)]
    unsaved = [re.compile(pattern) for pattern in unsaved_keys(model)]  # a class computes these itself
    missing = [n for n in ours if n not in shapes_on_disk and not any(pattern.search(n) for pattern in unsaved)]
    missing = _without_renamed(missing, expected, shapes_on_disk)
    other = [
        f"{n} {list(shapes_on_disk[n])} instead of {list(expected[n])}"
        for n in ours
        if shapes_on_disk.get(n, expected[n]) != expected[n]
    ]
    left = [name for name in shapes_on_disk if name not in expected and _about_positions(name)]
    angles = [name for name in left if name.endswith("inv_freq")]
    dropped = [name for name in left if name not in angles and not name.endswith("position_ids")]
    if missing:
        problem = f"the model needs {_some(missing)}, which are missing: transformers initializes them randomly."
        yield Finding(
            "error", "weights", problem, "Check config.json: it names another mechanism than the weights have."
        )
    if other:
        problem = (
            f"{_some(other)}: transformers refuses them, or initializes them randomly where mismatches are ignored."
        )
        yield Finding("error", "weights", problem, "Make config and weights agree, by the length above all.")
    if dropped:
        problem = f"{_some(dropped)}: this model does not have these position weights: they are dropped."
        yield Finding(
            "error", "weights", problem, "Check config.json: it names another mechanism than the weights have."
        )
    if angles:
        problem = f"{_some(angles)}: angles saved with the weights are not read; the config's are used."
        yield Finding("note", "weights", problem, "Check that the config says the same angles.")


def _without_renamed(missing: list[str], expected: Shapes, shapes_on_disk: Shapes) -> list[str]:
    """Return those of the `missing` weights whose shapes no weight with a name unknown to the model has.

    transformers saves some classes under the names of their original checkpoints (DeepSeek-V4).
    """
    unknown = Counter(
        shape for name, shape in shapes_on_disk.items() if name not in expected and not _about_positions(name)
    )
    wanted = Counter(expected[name] for name in missing)
    return [name for name in missing if unknown[expected[name]] < wanted[expected[name]]]


def number_findings(layout: Layout, chart: Chart) -> Iterator[Finding]:
    """Yield the weights that are integers where the model's are floating point."""
    if (chart.config or {}).get("quantization_config") or not Path(chart.source).is_dir():
        return
    floats = {name for name, tensor in layout.model.state_dict().items() if tensor.is_floating_point()}
    dtypes = folder_kinds(Path(chart.source))
    integers = [name for name in sorted(dtypes) if name in floats and not dtypes[name].startswith(FLOATS)]
    if integers:
        problem = f"{_some(integers)}: integers, which transformers takes for the floating-point numbers of the model."
        do = "Take config.json, with quantization_config, and weights from where they were made."
        yield Finding("error", "weights", problem, do)


def _about_positions(name: str) -> bool:
    return any(word in name for word in ("wpe.", "position", "relative_attention", "posswap.", "inv_freq"))


def _with_other_prefix(shapes: Shapes, expected: Shapes, model: PreTrainedModel) -> Shapes:
    """Return `shapes` under the names of the model: a base model's may lack its prefix, or have one too many."""
    prefix = f"{model.base_model_prefix}."
    longer = {f"{prefix}{name}": shape for name, shape in shapes.items()}
    shorter = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
    return max((longer, shorter), key=lambda named: len(named.keys() & expected.keys()))


def setting_findings(layout: Layout, chart: Chart) -> Iterator[Finding]:
    """Yield settings of the config that the model ignores."""
    config, config_class = chart.config or {}, type(layout.model.config)
    rotary = [module for module in layout.model.modules() if inv_freq_names(module)]
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    settings = [name for name in names if config.get(name) and config[name] != getattr(config_class, name, None)]
    if (
        settings
        and not rotary
        and not hasattr(layout.model, "_posswap")
        and "rope_parameters" not in config_class.__dict__
    ):
        problem = f"{', '.join(settings)}: {type(layout.model).__name__} has no rotary module, so this has no effect."
        yield Finding("error", "config.json", problem, "Remove it, or swap the mechanism with hf_posswap.")
    sites = layout.sites
    for name in filter(None, sites.main.config.split(".") if sites is not None else ()):
        config = config.get(name) or {}  # the rope parameters of its language model
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if isinstance(partial, float) and sites is not None and sites.geometry.rotary_dim and 0 < partial < 1:
        wanted, has = int(sites.geometry.head_dim * partial), sites.geometry.rotary_dim
        rope_type = rope.get("rope_type", "default")
        if wanted != has and rope_type == "default":
            problem = (
                f"partial_rotary_factor {partial:g} means {wanted} dimensions a head, and this class rotates {has}."
            )
            yield Finding("error", "config.json", problem, "Use rope type 'proportional', or a class that applies it.")


def length_findings(layout: Layout, chart: Chart) -> Iterator[Finding]:
    """Yield lengths beyond the end of a position table."""
    code, sites, rows = "tokenizer-length", layout.sites, None
    if sites is not None and sites.table_path is not None:
        shape = (chart.shapes or {}).get(f"{sites.table_path}.weight")
        if shape is None:
            shape = getattr(get(layout.model, sites.table_path), "weight", torch.empty(0, device="meta")).shape
        rows = shape[0] - sites.table_offset if len(shape) == 2 else None  # None: the table was removed
    most = (chart.tokenizer or {}).get("model_max_length")
    if not isinstance(most, (int, float)) or most > 1e15:  # transformers' placeholder for no limit
        return
    if rows is not None and most > rows:
        problem = f"model_max_length is {most:g}, and the position table ends at {rows}: longer texts are an error."
        yield Finding("warning", "tokenizer_config.json", problem, f"Set it to {rows}, or extend the table.", code)
    reach = _reach(layout, chart)
    if reach is not None and most < reach:
        problem = f"model_max_length is {most:g}, and the model is meant for {reach}: truncation cuts texts short."
        yield Finding("warning", "tokenizer_config.json", problem, f"Set it to {reach}.", code)


def _reach(layout: Layout, chart: Chart) -> int | None:
    config = chart.config or {}
    record = config.get("posswap")
    if isinstance(record, dict) and isinstance(record.get("max_length"), int):
        return int(record["max_length"])
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    most = config.get("max_position_embeddings")
    scaled = isinstance(rope, dict) and RopeSettings(rope).rope_type in ("yarn", "longrope", "llama3")
    return most if scaled and isinstance(most, int) else None


def readable(chart: Chart) -> Finding | None:
    """Return the finding that weights could not be checked, or None."""
    if chart.shapes is not None:
        return None
    here = Path(chart.source).is_dir() and any(Path(chart.source).glob("*.bin"))
    problem = "they are not safetensors, so only their config was checked." if here else "none could be checked."
    return Finding("note", "weights", problem, "Save them as safetensors.")


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
