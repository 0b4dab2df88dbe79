"""`check`: does a model do what its config says about positions?"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.checkpoints.doctor import Layout, config_findings, diagnose, length_findings, setting_findings
from hf_posswap.checkpoints.doctor_files import Chart, read_chart, read_json_of
from hf_posswap.checkpoints.doctor_findings import Diagnosis, Finding, worst_first
from hf_posswap.checkpoints.load import load
from hf_posswap.compat.torch_modules import unchanged
from hf_posswap.errors import PosswapError, SwapVerificationError
from hf_posswap.families.locating import locate
from hf_posswap.families.modules import get
from hf_posswap.families.sites import Sites, TokenTable
from hf_posswap.inspection.checking.angles import RotarySet, angle_findings, own_formula, rotary_sets
from hf_posswap.inspection.checking.report import CheckReport, Coverage
from hf_posswap.inspection.checking.running import running_findings
from hf_posswap.inspection.checking.settings import (
    generation_findings,
    key_findings,
    late_scaling,
    length_raised,
    lost_findings,
    scaling_findings,
    serving_findings,
    table_findings,
    theta_findings,
)
from hf_posswap.patching.apply.applied import check_structure
from hf_posswap.patching.inspect.describe import on_meta, read_config
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.verify.verify_swap import verify_swap
from hf_posswap.utils.auto_classes import TRUST
from hf_posswap.utils.format import said_by
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.threads import quiet_logger
from hf_posswap.utils.weight_shapes import Shapes

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OF_PROGRAMS = ("serving", "scaling-lengths", "attention-factor")
"""Codes about what other programs do with values that a swap wrote on purpose: its record is held against them."""
_FILE = "config.json against the loaded config"
_TOKENIZER = "the tokenizer's length"
_OUTPUTS = ("outputs-constant", "outputs-nonfinite")
MOST_WEIGHTS = 2 * 10**9
"""Parameters up to which `check` loads the weights of a checkpoint without being asked to."""


def check(
    model: PreTrainedModel | str | Path,
    *,
    forward: bool | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    **hub: object,
) -> CheckReport:
    """Check whether a model does what its config says about positions: any transformers model, swapped or not.

    It compares the angles in force with the config's and with the papers' formulas, the config with its config.json,
    lengths with tables and tokenizers, and runs a few tokens alone, padded and packed. `print(report)` shows it, and
    `report.raise_if_errors()` stops a script. The model is left as it is: its modes, its rotary state, its buffers. It
    runs in eval mode; a model that draws random numbers even there draws them from torch's own.

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
        UnsupportedSwapError: `model` is not a transformers model.

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


def _of_live(inner: PreTrainedModel, forward: bool | None, tokenizer: PreTrainedTokenizerBase | None) -> CheckReport:
    """Return the report on a live model."""
    examined = _Examined(type(inner).__name__, is_live=True)
    coverage, config = examined.coverage, inner.config.to_dict()
    raw, why = _config_file(inner)
    if raw is None:
        coverage.skip(_FILE, why)
    if tokenizer is None:
        coverage.skip(_TOKENIZER, "no tokenizer was given (tokenizer=)")
    length = getattr(tokenizer, "model_max_length", None)
    chart = Chart("", config, None, None, None if length is None else {"model_max_length": length}, None)
    with quiet_logger("transformers", logging.CRITICAL):
        layout = Layout(inner, examined.sites(inner))
        examined.group("the rope settings", lambda: config_findings(config, "config"))
        examined.group("the rope settings for this class", lambda: setting_findings(layout, chart))
        examined.group("lengths", lambda: length_findings(layout, chart))
        examined.model(inner, layout.sites, raw, forward)
        examined.last(inner, None, length)
    return examined.report()


@dataclass(eq=False)
class _Examined:
    """Findings, and what was and was not checked, as they come up."""

    source: str
    is_live: bool = field(kw_only=True)
    is_swapped: bool = False
    findings: list[Finding] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)

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
        return CheckReport(self.source, worst_first(unique), *map(tuple, vars(self.coverage).values()))

    def model(
        self, model: PreTrainedModel, sites: Sites | None, raw: dict[str, object] | None, forward: bool | None
    ) -> None:
        """Check a model: live, or a skeleton on the meta device."""
        swap = getattr(model, "_posswap", None)
        self.is_swapped = swap is not None
        is_offloaded = hasattr(model, "hf_device_map")  # accelerate fetches what is on the meta device
        is_skeleton = not is_offloaded and all(parameter.is_meta for parameter in model.parameters())
        computed = swap is not None and swap.plan.route != "native"
        sets: list[RotarySet] = []
        if not computed:
            self.group("angles", lambda: self._angles(model, sets, is_skeleton))
            self.group("scalings", lambda: scaling_findings(sets))
            self.group("thetas", lambda: theta_findings(model, sets))
            self.group("keys of the rope settings", lambda: key_findings(model.config))
            self.group("position tables", lambda: table_findings(model, sites))
        self.coverage.checked.insert(0, "config")
        if raw is not None and (swap is not None or getattr(model.config, "posswap", None) is not None):
            self.coverage.skip(_FILE, "a swap changed the config")
        elif raw is not None:
            self.coverage.checked.append(_FILE)
            self.group(_FILE, lambda: self._lost(model, raw))
        if swap is None:
            self.group("lengths", lambda: length_raised(model, sets, _length_in(raw)))
        self.group("generation_config", lambda: generation_findings(model, sites))
        runs = forward is not False and not is_skeleton
        ran: list[Finding] = []
        if runs:
            ran += running_findings(model, _rows(model, sites), self.coverage)
        else:
            self.coverage.skip("outputs, padding and packing", "the model was not run")
        broken = any(each.code in _OUTPUTS for each in ran)
        if not any(each.code in ("angles-nonfinite", "angles-missing") for each in self.findings):
            self.findings += ran
        else:  # that is why
            self.findings += [each for each in ran if each.code not in _OUTPUTS]
        if swap is not None:
            if broken:
                self.coverage.skip("what the swap does to outputs", "the outputs are broken")
            self._swap(model, runs=runs and not broken)

    def group(self, check: str, findings: Callable[[], Iterable[Finding]]) -> None:
        """Add the findings of a group of checks; where it raises, it is listed as not checked."""
        try:
            for finding in findings():
                self.findings.append(finding)
        except Exception as error:  # configs hold any values, and models any code
            self.coverage.fail(check, error)

    def sites(self, model: PreTrainedModel) -> Sites | None:
        """Return where the positions of a model are; None, with the reason, where no family describes it."""
        check = "position tables and their lengths"
        try:
            return locate(model)
        except PosswapError as error:
            self.coverage.skip(check, said_by(error, 200))
        except Exception as error:  # its config has values that fail anywhere
            self.coverage.fail(check, error)
        return None

    def last(self, model: PreTrainedModel, diagnosis: Diagnosis | None, length: object) -> None:
        """Check what serving programs read, and the scaling that `length`, the tokenizer's, does not reach."""
        try:
            self.findings += list(serving_findings(model.config, diagnosis))
        except Exception as error:  # no family, no length, or values that fail: other findings name them
            self.coverage.skip("what serving programs read", f"{type(error).__name__}: {said_by(error, 200)}")
        self.group("a scaling that no text reaches", lambda: late_scaling(model, length))

    def weights_not_loaded(self, source: str | Path, chart: Chart, forward: bool | None) -> None:
        """List the weights of a checkpoint as not checked, with the reason."""
        loads = "(forward=True, on the command line --forward, loads them)"
        if forward is False:
            self.coverage.skip("the weights", "not loaded, as requested by forward=False")
        elif _size(chart.shapes) > MOST_WEIGHTS:
            self.coverage.skip("the weights", f"more than 2e9 parameters, not loaded {loads}")
        elif Path(source).is_dir():
            self.coverage.fail("the weights", f"there are none in {source}: neither model.safetensors nor *.bin")
        else:
            self.coverage.skip("the weights", f"not loaded, because their number cannot be read {loads}")

    def _angles(self, model: PreTrainedModel, sets: list[RotarySet], is_skeleton: bool) -> Iterator[Finding]:
        """Yield what is wrong with the angles of a model, whose sets are added to `sets`."""
        sets += rotary_sets(model)
        if sets:
            self.coverage.checked.append(f"the angles of {', '.join(each.where for each in sets)}")
            if is_skeleton:
                self.coverage.skip("the angles in force", "the weights were not loaded, so only the class was checked")
            self.coverage.skipped += dict.fromkeys(filter(None, map(own_formula, sets)))
        elif getattr(model.config.get_text_config(), "rope_parameters", None):
            self.coverage.skip("angles", f"{type(model).__name__} has no rotary module that keeps them as inv_freq")
        yield from angle_findings(sets, is_skeleton=is_skeleton)

    def _lost(self, model: nn.Module, raw: dict[str, object]) -> list[Finding]:
        """Return what the config lost of its config.json, and drop what says the same."""
        lost = list(lost_findings(raw, model.config))
        named = {each.where.rpartition(" ")[2] for each in lost}
        self.findings = [
            each for each in self.findings if each.code != "theta-ignored" or each.where.split(".")[-1] not in named
        ]  # the same theta, and the file is where to write it
        return _changed_on_purpose(model, raw, lost) if lost and self.is_live else lost

    def _swap(self, model: PreTrainedModel, *, runs: bool) -> None:
        """Check that the swap of a model is in force: by its outputs where the model `runs`, or by its modules."""
        try:
            if runs:
                verify_swap(model)
            elif not all(parameter.is_meta for parameter in model.parameters()):
                check_structure(model)
            else:
                self.coverage.skip("the swap", "its weights were not loaded")
                return
        except SwapVerificationError as error:
            do = "Undo it with unpatch_model and patch again, or load the checkpoint with hf_posswap.load."
            self.findings.append(Finding("error", "the swap", str(error), do, "swap"))
        except Exception as error:  # a forward may raise anything
            self.coverage.fail("the swap", error)
            return
        self.coverage.checked.append("the swap")


def _of_checkpoint(source: str | Path, forward: bool | None, hub: dict[str, Any]) -> CheckReport:
    """Return the report on a folder or Hub id."""
    trust = hub[TRUST]
    files = {key: value for key, value in hub.items() if key != TRUST}
    examined, given = _Examined(str(source), is_live=False), source
    source = checkpoint_of(source, **files)
    chart = read_chart(source, **files)
    diagnosis: Diagnosis | None = None
    try:
        diagnosis = diagnose(chart, given, trust_remote_code=trust, **files)
        examined.findings += diagnosis.findings
        examined.coverage.checked += diagnosis.checked
    except PosswapError:
        raise
    except Exception as error:  # files hold any values
        examined.coverage.fail("the files, as posswap doctor checks them", error)
    if any(finding.code == "theta-null" for finding in examined.findings):
        examined.coverage.fail("the model", "none can be built, because a theta is null (theta-null)")
        return examined.report()
    if chart.tokenizer is None:
        examined.coverage.skip(_TOKENIZER, "there is no tokenizer_config.json")
    whole = forward is not False and (forward or _size(chart.shapes) <= MOST_WEIGHTS)
    has_bin = Path(source).is_dir() and any(Path(source).glob("*.bin"))
    whole = whole and (chart.shapes is not None or chart.adapter is not None or forward is True or has_bin)
    with quiet_logger("transformers", logging.CRITICAL):
        try:
            model = (
                unwrap(load(source, trust_remote_code=trust, **files))
                if whole
                else on_meta(source, trust_remote_code=trust)
            )
        except Exception as error:  # a model's own code may raise anything
            do = "Fix what it names; posswap doctor reads the files alone."
            if all(finding.severity != "error" for finding in examined.findings):
                examined.findings.append(Finding("error", str(source), str(error), do, "load"))
            examined.coverage.fail("the model", f"it cannot be {'loaded' if whole else 'built'}: {said_by(error, 200)}")
            return examined.report()
        if not whole:
            examined.weights_not_loaded(source, chart, forward)
        examined.model(model, examined.sites(model), chart.config, forward if whole else False)
        examined.last(model, diagnosis, (chart.tokenizer or {}).get("model_max_length"))
    return examined.report()


def _size(shapes: Shapes | None) -> int:
    return sum(torch.Size(shape).numel() for shape in (shapes or {}).values())


def _rows(model: PreTrainedModel, sites: Sites | None) -> int | None:
    """Return the positions of the model's shortest table; None: it has none."""
    rows = []
    for stack in () if sites is None else sites.stacks:
        if isinstance(stack.table, TokenTable):
            weight = getattr(get(model, stack.table.path), "weight", None)
            if weight is not None and weight.dim() == 2 and weight.shape[0] > 1:
                rows.append(weight.shape[0] - stack.table.offset)
    return min(rows, default=None)


def _length_in(raw: dict[str, object] | None) -> int | None:
    """Return the length in a config.json, or in that of its language model."""
    for values in (raw or {}, (raw or {}).get("text_config") or {}):
        length = values.get("max_position_embeddings") if isinstance(values, dict) else None
        if isinstance(length, int):
            return length
    return None


def _config_file(model: PreTrainedModel) -> tuple[dict[str, object] | None, str]:
    """Return the config.json that a live model was loaded from; None, and why, where it is not at hand."""
    source = getattr(model.config, "name_or_path", "")
    if not source:
        return None, "the model was not loaded from a checkpoint"
    try:
        return read_json_of(source, "config.json", local_files_only=True), f"{source} has no config.json"
    except (PosswapError, OSError, ValueError) as error:
        return None, said_by(error, 200)


def _changed_on_purpose(model: Any, raw: dict[str, object], lost: list[Finding]) -> list[Finding]:
    """Return what a live model's config lost of its config.json, as warnings where a fresh load does not lose it."""
    with contextlib.suppress(PosswapError, OSError, ValueError):
        fresh = read_config(model.config.name_or_path, local_files_only=True)
        dropped = {(each.code, each.where) for each in lost_findings(raw, fresh)}
        return [each if (each.code, each.where) in dropped else _as_changed(each) for each in lost]
    return lost


def _as_changed(finding: Finding) -> Finding:
    problem = finding.what.partition(": ")[0]
    problem += (
        ": the config was changed after loading, or another was passed, and the weights were trained by the file's."
    )
    do = "Load without config=, or write the change to config.json; after a change of theta or scaling, train."
    return replace(finding, severity="warning", what=problem, do=do)
