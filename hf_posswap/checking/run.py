"""`check`: does a model do what its config says about positions?"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.checking.angles import angle_findings, own_formula, rotary_sets
from hf_posswap.checking.files import key_findings, lost_findings
from hf_posswap.checking.report import CheckReport
from hf_posswap.checking.running import running_findings
from hf_posswap.checking.serving import serving_findings
from hf_posswap.checking.settings import (
    generation_findings,
    late_scaling,
    length_raised,
    scaling_findings,
    table_findings,
    theta_findings,
)
from hf_posswap.checkpoints.doctor_checks.diagnose import config_findings, diagnose
from hf_posswap.checkpoints.doctor_checks.findings import Finding, worst_first
from hf_posswap.checkpoints.doctor_checks.model_traps import Layout, length_findings, setting_findings
from hf_posswap.checkpoints.doctor_checks.reading import Chart, read_chart, read_json_of
from hf_posswap.checkpoints.load import load
from hf_posswap.compat.torch_modules import unchanged
from hf_posswap.errors import PosswapError, SwapVerificationError
from hf_posswap.families.locating import locate
from hf_posswap.families.modules import get
from hf_posswap.families.sites import Sites, TokenTable
from hf_posswap.patching.apply.structure import check_structure
from hf_posswap.patching.inspect.describe import on_meta, read_config
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.verify.verify_swap import verify_swap
from hf_posswap.utils.auto_classes import TRUST
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.threads import quiet_logger
from hf_posswap.utils.weight_shapes import Shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OF_PROGRAMS = ("serving", "scaling-lengths", "attention-factor")
"""Codes about what other programs do with values that a swap wrote on purpose: its record is held against them."""
_OUTPUTS = ("outputs-constant", "outputs-nonfinite")
MOST_WEIGHTS = 2 * 10**9
"""Parameters up to which `check` loads the weights of a checkpoint without being asked to."""


def check(
    model: PreTrainedModel | str | Path,
    *,
    forward: bool | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    **hub: Any,
) -> CheckReport:
    """Check whether a model does what its config says about positions: any transformers model, swapped or not.

    It compares the angles in force with the config's and with the papers' formulas, the config with its config.json,
    lengths with tables and tokenizers, and runs a few tokens alone, padded and packed. `print(report)` shows it, and
    `report.raise_if_errors()` stops a script. The model is left as it is: its modes, its rotary state, its buffers; so
    is torch's random state.

    Args:
        model: a live model (also a PEFT model or a SentenceTransformer), or a folder, a Hub id or a GGUF file: of a
            model, of a swapped one, or of a PEFT adapter. Of a checkpoint, the files are checked too, as `doctor` does.
        forward: run the model on a few tokens. None: if it has weights; of a checkpoint, if it has at most 2e9
            parameters, otherwise its weights are not loaded.
        tokenizer: of a live model, to check its length.
        trust_remote_code: run code of a checkpoint, where its config needs that.
        hub: revision, token, cache_dir, local_files_only for a Hub id.

    Raises:
        CheckpointError: there is nothing readable.
        UnsupportedSwapError: `model` is no transformers model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> small = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, intermediate_size=8)
        >>> model = LlamaForCausalLM(LlamaConfig(**small))
        >>> check(model).clean
        True
        >>> model.config.rope_parameters["rope_theta"] = 500000.0  # too late: the angles are computed
        >>> [finding.code for finding in check(model).findings]
        ['angles-differ']
    """
    if isinstance(model, (str, Path)):
        return _of_checkpoint(model, forward, hub | {TRUST: trust_remote_code})
    inner = unwrap(model)
    with unchanged(inner):
        return _of_live(inner, forward, tokenizer)


def _of_live(inner: PreTrainedModel, forward: bool | None, tokenizer: Any) -> CheckReport:
    """Return the report on a live model."""
    raw = _config_file(inner)
    examined = _Examined(type(inner).__name__, is_live=True)
    layout = Layout(inner, _sites(inner))
    length = getattr(tokenizer, "model_max_length", None)
    chart = Chart(
        "", inner.config.to_dict(), None, None, None if length is None else {"model_max_length": length}, None
    )
    with quiet_logger("transformers", logging.CRITICAL):
        examined.findings += [*config_findings(inner.config.to_dict(), "config"), *setting_findings(layout, chart)]
        examined.findings += length_findings(layout, chart)
        examined.model(inner, layout.sites, raw, forward)
        examined.findings += [*serving_findings(inner.config), *late_scaling(inner, length)]
    return examined.report()


class _Examined:
    """Findings, and what was and was not checked, as they come up."""

    def __init__(self, source: str, *, is_live: bool) -> None:
        self.source = source
        self.findings: list[Finding] = []
        self.checked: list[str] = []
        self.skipped: list[str] = []
        self.is_live, self.is_swapped = is_live, False

    def report(self) -> CheckReport:
        """Return the report, each finding once."""
        if any(each.severity == "error" or each.code == "scaling-noop" for each in self.findings):
            # what programs make of wrong settings is no news
            self.findings = [each for each in self.findings if each.code != "serving"]
        codes = _OF_PROGRAMS if self.is_swapped else ("serving",)
        demoted = [each.severity == "warning" and each.code in codes for each in self.findings]
        findings = [
            replace(each, severity="note") if is_demoted else each
            for each, is_demoted in zip(self.findings, demoted, strict=True)
        ]
        unique = list(dict.fromkeys(findings))
        return CheckReport(self.source, worst_first(unique), tuple(self.checked), tuple(self.skipped))

    def model(self, model: Any, sites: Sites | None, raw: dict[str, Any] | None, forward: bool | None) -> None:
        """Check a model: live, or a skeleton on the meta device."""
        swap = getattr(model, "_posswap", None)
        self.is_swapped = swap is not None
        is_offloaded = hasattr(model, "hf_device_map")  # accelerate fetches what is on the meta device
        is_skeleton = not is_offloaded and all(parameter.is_meta for parameter in model.parameters())
        computed = swap is not None and swap.plan.route != "native"
        sets = [] if computed else rotary_sets(model)
        self.checked.append("config")
        if sets:
            self.checked.append(f"the angles of {', '.join(each.where for each in sets)}")
            self.findings += angle_findings(sets, is_skeleton=is_skeleton)
            self.skipped += dict.fromkeys(filter(None, map(own_formula, sets)))
        if not computed:
            self.findings += [*scaling_findings(sets), *theta_findings(model, sets), *key_findings(model.config)]
            self.findings += table_findings(model, sites)
        if raw is not None and swap is None and getattr(model.config, "posswap", None) is None:
            self.checked.append("config.json against the loaded config")
            lost = list(lost_findings(raw, model.config))
            named = {each.where.rpartition(" ")[2] for each in lost}
            self.findings = [
                each for each in self.findings if each.code != "theta-ignored" or each.where.split(".")[-1] not in named
            ]  # the same theta, and the file is where to write it
            self.findings += _changed_on_purpose(model, raw, lost) if lost and self.is_live else lost
        if swap is None:
            self.findings += length_raised(model, sets, _length_in(raw))
        self.findings += generation_findings(model, sites)
        runs = forward is not False and not is_skeleton
        ran: list[Finding] = []
        if runs:
            ran += running_findings(model, _rows(model, sites), self.checked, self.skipped)
        else:
            self.skipped.append("padding and packing: the model was not run")
        broken = any(each.code in _OUTPUTS for each in ran)
        if not any(each.code in ("angles-nonfinite", "angles-missing") for each in self.findings):
            self.findings += ran
        else:  # that is why
            self.findings += [each for each in ran if each.code not in _OUTPUTS]
        if swap is not None:
            if broken:
                self.skipped.append("what the swap does to outputs: the outputs are broken")
            self._swap(model, runs=runs and not broken)

    def _swap(self, model: Any, *, runs: bool) -> None:
        """Check that the swap of a model is in force: by its outputs where the model `runs`, or by its modules."""
        try:
            if runs:
                verify_swap(model)
            elif not all(parameter.is_meta for parameter in model.parameters()):
                check_structure(model)
            else:
                self.skipped.append("the swap: its weights were not loaded")
                return
        except SwapVerificationError as error:
            do = "Undo it with unpatch_model and patch again, or load the checkpoint with hf_posswap.load."
            self.findings.append(Finding("error", "the swap", str(error), do, "swap"))
        except PosswapError as error:
            self.skipped.append(f"the swap: {error}")
            return
        self.checked.append("the swap")


def _of_checkpoint(source: str | Path, forward: bool | None, hub: dict[str, Any]) -> CheckReport:
    """Return the report on a folder or Hub id."""
    trust = hub[TRUST]
    files = {key: value for key, value in hub.items() if key != TRUST}
    examined = _Examined(str(source), is_live=False)
    source = checkpoint_of(source, **files)
    chart = read_chart(source, **files)
    diagnosis = diagnose(chart, trust_remote_code=trust, **files)
    examined.findings += diagnosis.findings
    examined.checked += diagnosis.checked
    if any(finding.code == "theta-null" for finding in diagnosis.findings):
        examined.skipped.append("the model: none can be built")
        return examined.report()
    whole = forward is not False and (forward or _size(chart.shapes) <= MOST_WEIGHTS)
    whole = whole and (chart.shapes is not None or chart.adapter is not None or forward is True or _has_weights(source))
    with quiet_logger("transformers", logging.CRITICAL):
        try:
            model = (
                unwrap(load(source, trust_remote_code=trust, **files))
                if whole
                else on_meta(source, trust_remote_code=trust)
            )
        except (PosswapError, OSError) as error:
            do = "Fix what it names; posswap doctor reads the files alone."
            if all(finding.severity != "error" for finding in examined.findings):
                examined.findings.append(Finding("error", str(source), str(error), do, "load"))
            examined.skipped.append(f"the model: it cannot be {'loaded' if whole else 'built'}")
            return examined.report()
        if forward is None and not whole:
            examined.skipped.append(
                f"the weights: {'more than 2e9 parameters, ' if _size(chart.shapes) > MOST_WEIGHTS else ''}not loaded "
                "(forward=True, on the command line --forward, loads them)"
            )
        sites = _sites(model)
        examined.model(model, sites, chart.config, forward if whole else False)
        examined.findings += serving_findings(model.config, diagnosis)
        examined.findings += late_scaling(model, (chart.tokenizer or {}).get("model_max_length"))
    return examined.report()


def _size(shapes: Shapes | None) -> int:
    return sum(torch.Size(shape).numel() for shape in (shapes or {}).values())


def _has_weights(source: str | Path) -> bool:
    return Path(source).is_dir() and any(Path(source).glob("*.bin"))


def _sites(model: Any) -> Sites | None:
    try:
        return locate(model)
    except Exception:  # no family describes this model, or its config has values that fail anywhere
        return None


def _rows(model: Any, sites: Sites | None) -> int | None:
    """Return the positions of the model's shortest table; None: it has none."""
    rows = []
    for stack in () if sites is None else sites.stacks:
        if isinstance(stack.table, TokenTable):
            weight = getattr(get(model, stack.table.path), "weight", None)
            if weight is not None and weight.dim() == 2 and weight.shape[0] > 1:
                rows.append(weight.shape[0] - stack.table.offset)
    return min(rows, default=None)


def _length_in(raw: dict[str, Any] | None) -> int | None:
    """Return the length in a config.json, or in that of its language model."""
    for values in (raw or {}, (raw or {}).get("text_config") or {}):
        length = values.get("max_position_embeddings") if isinstance(values, dict) else None
        if isinstance(length, int):
            return length
    return None


def _config_file(model: Any) -> dict[str, Any] | None:
    """Return the config.json that a live model was loaded from; None where it is not at hand."""
    source = getattr(model.config, "name_or_path", "")
    if not source:
        return None
    with contextlib.suppress(PosswapError, OSError, ValueError):
        return read_json_of(source, "config.json", local_files_only=True)
    return None


def _changed_on_purpose(model: Any, raw: dict[str, Any], lost: list[Finding]) -> list[Finding]:
    """Return what a live model's config lost of its config.json, as warnings where a fresh load does not lose it."""
    with contextlib.suppress(PosswapError, OSError, ValueError):
        fresh = read_config(model.config.name_or_path, local_files_only=True)
        dropped = {(each.code, each.where) for each in lost_findings(raw, fresh)}
        return [each if (each.code, each.where) in dropped else _as_changed(each) for each in lost]
    return lost


def _as_changed(finding: Finding) -> Finding:
    what = finding.what.partition(": ")[0]
    what += ": the config was changed after loading, or another was passed, and the weights were trained by the file's."
    do = "Load without config=, or write the change to config.json; after a change of theta or scaling, train."
    return replace(finding, severity="warning", what=what, do=do)
