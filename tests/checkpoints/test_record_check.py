"""A record that lies in a native checkpoint is refused wherever it is read, and an honest one never is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_posswap
from hf_posswap.errors import NotPatchedError, RecordError
from hf_posswap.evaluation.scoring import reach_of
from hf_posswap.harness.model import length_of
from tests.contract.models import LENGTH
from tests.contract.others import ALL
from tests.contract.pairs import gap, logits, words

LONG = 2 * LENGTH
IDS = words(2, LENGTH)
Record = dict[str, Any]
SWAPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "yarn": ("llama", "yarn", {"factor": 4.0}),
    "linear": ("llama", "linear", {"factor": 2.0}),
    "dynamic": ("llama", "dynamic", {"factor": 2.0}),
    "rotary nope": ("llama", "nope", {"max_length": LONG}),
    "nope": ("gpt2", "nope", {"max_length": LONG}),
    "sinusoidal": ("gpt2", "sinusoidal", {"max_length": LONG}),
    "fitted": ("gpt2", "sinusoidal", {"max_length": LONG, "ridge": 30.0}),
    "learned": ("gpt2", "learned", {"max_length": LONG, "extend": "tile"}),
    "by layer": ("gemma3 (frequencies by layer type)", "yarn", {"factor": 4.0}),
    "both stacks": ("bart", "sinusoidal", {"max_length": LONG}),
}


def _set(**values: Any) -> Callable[[Record], None]:
    return lambda record: record.update(values)


def _scheme(**values: Any) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record["scheme"] = {key: value for key, value in (record["scheme"] | values).items() if value is not ...}
        if record.get("stacks"):
            record["stacks"] = dict.fromkeys(record["stacks"], record["scheme"])

    return change


def _instead(**values: Any) -> Callable[[Record], None]:
    return lambda record: record.update(scheme=values)


def _original(**values: Any) -> Callable[[Record], None]:
    return lambda record: record["original"].update(values)


LIES: dict[str, tuple[str, Callable[[Record], None]]] = {
    "another factor": ("yarn", _scheme(factor=8.0)),
    "another temperature": ("yarn", _scheme(attention_factor=1.5)),
    "another ramp that turns alike": ("yarn", _scheme(beta_fast=64.0)),
    "another length before that turns alike": ("yarn", _scheme(original_length=LENGTH + 1)),
    "another rope": ("yarn", _instead(name="linear", factor=4.0)),
    "a scheme that is not there": ("yarn", _instead(name="nope")),
    "a plugin scheme": ("yarn", _instead(name="alibi")),
    "a plugin route": ("yarn", _set(route="plugin")),
    "inside attention": ("yarn", _set(site="attention")),
    "a longer reach": ("yarn", _set(max_length=16 * LENGTH)),
    "another type": ("yarn", _set(base_type="mistral")),
    "rope parameters that are none": ("yarn", _original(rope_parameters={"rope_type": "unheard"})),
    "stacks": ("yarn", _set(stacks={"decoder": {"name": "nope"}})),
    "a smaller factor": ("linear", _scheme(factor=1.5)),
    "another dynamic factor": ("dynamic", _scheme(factor=3.0)),
    "a rotation that was removed": ("rotary nope", _instead(name="linear", factor=2.0)),
    "a table that is not there": ("nope", _instead(name="sinusoidal", scale=1.0)),
    "fewer rows": ("nope", _set(max_length=LENGTH)),
    "no table": ("sinusoidal", _instead(name="nope")),
    "another scale": ("sinusoidal", _scheme(scale=0.5)),
    "another base of the sinusoids": ("sinusoidal", _scheme(base=500.0)),
    "another scale of a fit": ("fitted", _scheme(scale=0.5)),
    "no fit": ("fitted", _scheme(ridge=None, residual=None, growth=None)),
    "a fit that was none": ("sinusoidal", _scheme(ridge=1.0, residual=0.5)),
    "more rows": ("sinusoidal", _set(max_length=LONG + 1)),
    "a formula for a learned table": ("learned", _instead(name="sinusoidal", scale=0.02)),
    "no learned table": ("learned", _instead(name="nope")),
    "more learned rows": ("learned", _set(max_length=2 * LONG)),
    "another factor in some layers": ("by layer", _scheme(factor=2.0)),
    "another scale in both": ("both stacks", _scheme(scale=0.5)),
}
HARMLESS: dict[str, tuple[str, Callable[[Record], None]]] = {
    "another base before": ("yarn", _original(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "another length before": ("yarn", _original(max_position_embeddings=LENGTH // 2)),
    "another learned length before": ("learned", _original(max_position_embeddings=LENGTH // 2)),
}
"""What a record says of the model before the swap, and nothing of the swapped one depends on."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of honest native checkpoints."""
    folders = {}
    for name, (kind, scheme, options) in SWAPS.items():
        model = ALL[kind].build()
        assert hf_posswap.swap_plan(hf_posswap.patch_model(model, scheme, **options)).route == "native"
        folders[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
        model.save_pretrained(folders[name])
    return folders


def changed(folder: Path, target: Path, change: Callable[[Record], None]) -> Path:
    """Copy a checkpoint to `target` with its record changed, and return `target`."""
    target.mkdir()
    (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    before = copy.deepcopy(config["posswap"])
    change(config["posswap"])
    assert config["posswap"] != before
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("name", SWAPS)
@pytest.mark.parametrize("once", [False, True], ids=["", "once bfloat16"])
def test_an_honest_record_is_believed(saved: dict[str, Path], tmp_path: Path, name: str, once: bool) -> None:
    folder = saved[name]
    if once:
        folder = tmp_path
        hf_posswap.load(saved[name]).to(torch.bfloat16).float().save_pretrained(folder)  # type: ignore[arg-type]
    loaded = hf_posswap.load(folder).eval()
    stock = type(loaded).from_pretrained(folder).eval()
    assert gap(logits(loaded, IDS), logits(stock, IDS)) == 0
    assert hf_posswap.explain(folder).report.swapped == hf_posswap.describe_positions(loaded).swapped


@pytest.mark.parametrize("lie", LIES)
def test_a_record_that_lies_is_refused(saved: dict[str, Path], tmp_path: Path, lie: str) -> None:
    name, change = LIES[lie]
    folder = changed(saved[name], tmp_path / "lying", change)
    with pytest.raises(RecordError, match=r"config.posswap|relative"):
        hf_posswap.load(folder)


@pytest.mark.parametrize("lie", HARMLESS)
def test_what_a_record_says_of_the_model_before_changes_nothing(
    saved: dict[str, Path], tmp_path: Path, lie: str
) -> None:
    name, change = HARMLESS[lie]
    loaded = hf_posswap.load(changed(saved[name], tmp_path / "lying", change)).eval()
    assert gap(logits(loaded, IDS), logits(hf_posswap.load(saved[name]).eval(), IDS)) == 0
    assert hf_posswap.verify_swap(loaded).checks


@pytest.mark.parametrize("lie", ["another factor", "a longer reach", "a plugin scheme", "fewer rows", "more rows"])
def test_what_reads_the_config_alone_refuses_it_too(saved: dict[str, Path], tmp_path: Path, lie: str) -> None:
    name, change = LIES[lie]
    folder = changed(saved[name], tmp_path / "lying", change)
    for reader in (hf_posswap.explain, lambda it: hf_posswap.push(it, "me/mine", dry_run=True)):
        with pytest.raises(RecordError, match=r"config.posswap"):
            reader(folder)
    assert hf_posswap.doctor(folder).findings[0].severity == "error"


@pytest.mark.parametrize("name", ["nope", "sinusoidal", "both stacks"])
def test_weights_that_are_not_what_the_record_says_are_refused(
    saved: dict[str, Path], tmp_path: Path, name: str
) -> None:
    target = tmp_path / "lying"
    target.mkdir()
    (target / "config.json").write_text((saved[name] / "config.json").read_text())
    weights = load_file(saved[name] / "model.safetensors")
    table = next(key for key in weights if "wpe" in key or "embed_positions" in key)
    weights[table][5] += 0.5
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecordError, match=table.removesuffix(".weight")):
        hf_posswap.load(target)


def test_the_error_names_what_differs(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(saved["yarn"], tmp_path / "lying", _scheme(factor=8.0))
    with pytest.raises(RecordError, match=r"factor=4.0 instead of 8.0.*remove posswap from it"):
        hf_posswap.load(folder)


def test_a_lying_model_that_transformers_read_is_described_as_what_it_is(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(saved["learned"], tmp_path / "lying", _instead(name="nope"))
    stock: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    report = hf_posswap.describe_positions(stock)
    assert (report.swapped, report.native, report.limit) == (None, f"learned table, {LONG} positions", LONG)
    assert (reach_of(stock).limit, length_of(stock)) == (LONG, None)
    for refused in (hf_posswap.verify_swap, hf_posswap.unpatch_model):
        with pytest.raises(NotPatchedError, match="hf_posswap.load"):
            refused(stock)
