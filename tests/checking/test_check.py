"""`check`: each fault is found where it was planted, and nothing is found where there is none."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typer.testing import CliRunner

import hf_posswap
from hf_posswap import CheckReport, check, patch_model
from hf_posswap.checkpoints.doctor_findings import Finding
from hf_posswap.cli import app
from hf_posswap.errors import CheckpointError, PositionCheckError, PosswapError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.rope_config import RopeSettings
from hf_posswap.inspection.checking import run
from hf_posswap.inspection.checking.report import CODES
from hf_posswap.rope_math import default_inv_freq
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.testing.tiny import language_models, tiny_model
from tests.contract.models import LENGTH, TINY, build

ROOT = Path(__file__).resolve().parents[2]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"max_position_embeddings": 128, "rope_parameters": YARN}


def edited(folder: Path, model: Any = None, *, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Return a folder with a tiny model's checkpoint, and other values in its config.json."""
    (model or build("llama")).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in drop} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def codes(report: CheckReport) -> dict[str, str]:
    """Return the severity of each code found."""
    return {finding.code: finding.severity for finding in reversed(report.findings)}


class Deaf(LlamaForCausalLM):
    """A Llama that forgets to pass its mask on."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **inputs: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, **inputs)


class Plain(LlamaRotaryEmbedding):
    """A rotary module that knows one rope type, and one theta."""

    theta = 0.0

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.config, self.attention_scaling = config, 1.0
        theta = self.theta or config.rope_parameters["rope_theta"]
        self.inv_freq = nn.Buffer(default_inv_freq(theta, 16), persistent=False)


class Fixed(Plain):
    theta = 77.0


def with_module(module: type[Plain], **changes: Any) -> Any:
    model = build("llama", **changes)
    model.model.rotary_emb = module(model.config)
    return model


def changed(model: Any, act: Callable[[Any], Any]) -> Any:
    act(model)
    return model


def set_rope(model: Any) -> None:
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}


def replace_angles(model: Any, angles: Tensor) -> None:
    model.model.rotary_emb.inv_freq = angles


def loaded_as_plain(folder: Path, **values: Any) -> Any:
    """Return a model whose config.json says otherwise than the config that it was loaded by."""
    model = build("llama", **values)
    model.save_pretrained(folder)
    plain = TINY["llama"].config(max_position_embeddings=model.config.max_position_embeddings)
    return LlamaForCausalLM.from_pretrained(folder, config=plain)


def without_weight(folder: Path, name: str) -> Path:
    build("llama").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({key: value for key, value in weights.items() if key != name}, folder / "model.safetensors")
    return folder


def fill(model: Any, name: str, value: float, index: Any = ...) -> Any:
    with torch.no_grad():
        model.get_parameter(name)[index] = value
    return model


def constant(model: Any) -> Any:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.02)
    return model


UP = "model.layers.1.mlp.up_proj.weight"


def other_slopes(model: Any) -> Any:
    patch_model(model, "alibi")
    mechanism = model.model.posswap
    mechanism.constant_slopes = 3.0 * mechanism.constant_slopes
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def tokenizer_of(folder: Path, length: int) -> Path:
    build("gpt2").save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    return folder


Make = Callable[[Path], Any]
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
PLANTED: dict[str, tuple[str, Make, Make]] = {
    "angles-differ": (
        "error",
        lambda folder: changed(build("llama"), set_rope),
        lambda folder: build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ),
    "angles-missing": (
        "error",
        lambda folder: changed(build("llama"), lambda m: replace_angles(m, torch.ones(8, device="meta"))),
        lambda folder: tiny_model("llama"),  # all of it is: a skeleton
    ),
    "angles-nonfinite": (
        "error",
        lambda folder: changed(build("llama"), lambda m: replace_angles(m, torch.full((8,), torch.nan))),
        lambda folder: build("llama"),
    ),
    "angles-rounded": (
        "error",
        lambda folder: build("llama").bfloat16(),
        lambda folder: LlamaForCausalLM.from_pretrained(saved(build("llama"), folder), dtype=torch.bfloat16),
    ),
    "attention-factor": (
        "error",
        lambda folder: changed(
            build("llama", **LONG), lambda m: setattr(m.model.rotary_emb, "attention_scaling", 1.0)
        ),
        lambda folder: build("llama", **LONG | {"rope_parameters": YARN | {"attention_factor": 1.138629436}}),
    ),
    "checkpoint": (
        "error",
        lambda folder: edited(folder, build("gpt2"), rope_scaling={"type": "linear", "factor": 2.0}),
        lambda folder: edited(folder, build("gpt2")),
    ),
    "generation-length": (
        "warning",
        lambda folder: changed(build("gpt2"), lambda m: setattr(m.generation_config, "max_length", 1000)),
        lambda folder: changed(build("gpt2"), lambda m: setattr(m.generation_config, "max_length", 32)),
    ),
    "length-raised": (
        "warning",
        lambda folder: LlamaForCausalLM.from_pretrained(saved(build("llama"), folder), max_position_embeddings=128),
        lambda folder: patch_model(LlamaForCausalLM.from_pretrained(saved(build("llama"), folder)), "yarn", factor=4.0),
    ),
    "length-table": (
        "error",
        lambda folder: changed(build("gpt2"), lambda m: setattr(m.config, "n_positions", 64)),
        lambda folder: patch_model(build("gpt2"), "learned", max_length=64),
    ),
    "load": (
        "error",
        lambda folder: without_weight(folder, "model.layers.0.mlp.up_proj.weight"),
        lambda folder: saved(build("llama"), folder),
    ),
    "mask-ignored": (
        "note",
        lambda folder: Deaf(TINY["llama"].config()),
        lambda folder: LlamaForCausalLM(TINY["llama"].config()),
    ),
    "outputs-constant": (
        "error",
        lambda folder: fill(build("llama"), "lm_head.weight", 0.0),
        lambda folder: fill(build("llama"), "lm_head.weight", 0.0, slice(96)),  # one row is left
    ),
    "outputs-nonfinite": (
        "error",
        lambda folder: fill(build("llama"), UP, math.nan, (3, 5)),
        lambda folder: fill(build("llama"), UP, 1e3, (3, 5)),
    ),
    "packing": ("note", lambda folder: build("opt"), lambda folder: build("llama")),
    "padding": ("note", lambda folder: build("gpt2"), lambda folder: build("opt")),
    "rope-key": (
        "warning",
        lambda folder: build("llama", rope_parameters=DEFAULT | {"factor": 4.0}),
        lambda folder: build("llama", rope_parameters=DEFAULT | {"factor": 1.0}),
    ),
    "rope-settings": (
        "error",
        lambda folder: edited(folder, rope_parameters=[1]),
        lambda folder: edited(folder, rope_parameters={}),
    ),
    "rope-type": (
        "note",
        lambda folder: edited(folder, rope_parameters=DEFAULT | {"rope_type": "magic"}),
        lambda folder: edited(folder),
    ),
    "rope-type-twice": (
        "error",
        lambda folder: edited(folder, rope_parameters=DEFAULT | {"type": "yarn"}),
        lambda folder: edited(folder, rope_parameters=DEFAULT | {"type": "default"}),
    ),
    "scaling-by-length": (
        "note",
        lambda folder: build("llama", rope_parameters=DEFAULT | {"rope_type": "dynamic", "factor": 2.0}),
        lambda folder: build("llama", rope_parameters=DEFAULT | {"rope_type": "linear", "factor": 2.0}),
    ),
    "scaling-factor": (
        "error",
        lambda folder: build("llama", **longrope([1.0], [2.0])),
        lambda folder: build("llama", **longrope([1.0] * 8, [2.0] * 8)),
    ),
    "scaling-ignored": (
        "error",
        lambda folder: with_module(Plain, **LONG),
        lambda folder: with_module(Plain),
    ),
    "scaling-lengths": (
        "warning",
        lambda folder: build("llama", **LONG | {"max_position_embeddings": 100}),
        lambda folder: build("llama", **LONG),
    ),
    "scaling-lost": (
        "error",
        lambda folder: edited(folder, llm_config={"rope_scaling": YARN}),
        lambda folder: LlamaForCausalLM.from_pretrained(saved(build("llama", **LONG), folder)),
    ),
    "scaling-noop": (
        "warning",
        lambda folder: build("llama", rope_parameters=YARN | {"factor": 1.0}),
        lambda folder: build("llama", **LONG),
    ),
    "scaling-original": (
        "error",
        lambda folder: edited(
            folder,
            max_position_embeddings=128,
            rope_parameters={key: value for key, value in YARN.items() if key != "original_max_position_embeddings"},
        ),
        lambda folder: edited(folder, **LONG),
    ),
    "scaling-twice": (
        "error",
        lambda folder: edited(folder, **LONG, rope_scaling={"type": "linear", "factor": 2.0}),
        lambda folder: edited(
            folder, **LONG, rope_scaling={key: v for key, v in YARN.items() if key != "rope_type"} | {"type": "yarn"}
        ),
    ),
    "serving": (
        "note",
        lambda folder: saved(patch_model(build("llama"), "fire"), folder),
        lambda folder: saved(build("llama"), folder),
    ),
    "swap": (
        "error",
        lambda folder: other_slopes(build("llama")),
        lambda folder: patch_model(build("llama"), "alibi"),
    ),
    "theta-ignored": (
        "error",
        lambda folder: changed(build("llama"), lambda m: setattr(m.config, "rope_theta", 5e5)),
        lambda folder: changed(build("llama"), lambda m: setattr(m.config, "rope_theta", 1e4)),
    ),
    "theta-lost": (
        "error",
        lambda folder: edited(folder, drop=("rope_parameters",), rotary_emb_base=5e5),
        lambda folder: edited(folder, drop=("rope_parameters",), rope_theta=5e5),
    ),
    "theta-missing": (
        "warning",
        lambda folder: edited(folder, rope_parameters={"rope_type": "linear", "factor": 2.0}),
        lambda folder: edited(folder, rope_parameters=DEFAULT | {"rope_type": "linear", "factor": 2.0}),
    ),
    "theta-null": (
        "error",
        lambda folder: edited(folder, drop=("rope_parameters",), rope_theta=None),
        lambda folder: edited(folder, rope_theta=None),  # rope_parameters has one
    ),
    "theta-outside": (
        "warning",
        lambda folder: edited(folder, rope_parameters={"rope_type": "linear", "factor": 2.0}, rope_theta=5e5),
        lambda folder: edited(folder, drop=("rope_parameters",), rope_theta=5e5),
    ),
    "theta-twice": (
        "error",
        lambda folder: edited(folder, rope_parameters=DEFAULT, rope_theta=5e5),
        lambda folder: edited(folder, rope_parameters=DEFAULT, rope_theta=1e4),
    ),
    "theta-value": (
        "error",
        lambda folder: edited(folder, rope_parameters=DEFAULT | {"rope_theta": 0.5}),
        lambda folder: edited(folder, rope_parameters=DEFAULT),
    ),
    "tokenizer-length": (
        "warning",
        lambda folder: tokenizer_of(folder, 1024),
        lambda folder: tokenizer_of(folder, 32),
    ),
}  # fmt: skip
BY_HAND = {"angles-formula"}
"""Codes with a test of their own."""


def longrope(short: list[float], long: list[float]) -> dict[str, Any]:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long, "factor": 4.0}
    return {"max_position_embeddings": 128, "rope_parameters": rope | {"original_max_position_embeddings": 32}}


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_fault_is_found_and_a_sound_model_next_to_it_is_not(code: str, tmp_path: Path) -> None:
    severity, plant, leave = PLANTED[code]
    report = check(plant(tmp_path / "bad"))
    assert codes(report).get(code) == severity, report
    assert report.ok == (not any(each.severity == "error" for each in report.findings))
    finding = next(each for each in report.findings if each.code == code)
    assert finding.where
    assert finding.what.endswith((".", ")"))
    assert finding.do.endswith((".", ")", "?", "}", "x'")) or finding.code == "serving", finding
    assert code not in codes(check(leave(tmp_path / "good")))


def test_every_code_is_planted_explained_on_the_page_and_used() -> None:
    assert set(PLANTED) | BY_HAND == set(CODES)
    page = (ROOT / ".docs" / "pages" / "check.md").read_text(encoding="utf-8")
    assert [code for code, meaning in CODES.items() if f"| `{code}` | {meaning}" not in page] == []
    files = [
        *(ROOT / "hf_posswap").glob("inspection/checking/*.py"),
        *(ROOT / "hf_posswap").glob("checkpoints/doctor*.py"),
    ]
    source = "".join(path.read_text(encoding="utf-8") for path in files if path.stem != "report")
    assert [code for code in CODES if f'"{code}"' not in source] == []


def test_another_formula_than_the_papers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = ROPE_INIT_FUNCTIONS["yarn"]

    def wrong(*args: Any, **kwargs: Any) -> tuple[Tensor, float]:
        angles, factor = stock(*args, **kwargs)
        return angles * 1.01, factor

    assert "angles-formula" not in codes(check(build("llama", **LONG)))
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "yarn", wrong)
    assert codes(check(build("llama", **LONG)))["angles-formula"] == "error"


def overflowing(name: str) -> Any:
    """Return a model of finite weights that overflows in half precision, and not in float32."""
    model = TINY["llama"].build()
    fill(model, UP, 6e4)
    fill(model, UP.replace("up", "gate"), 6e4)
    half = {key: value.to(getattr(torch, name)) for key, value in model.named_parameters()}
    for path, value in half.items():
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(value))
    return model


BROKEN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "NaN": (lambda: fill(build("llama"), UP, math.nan, 0), "outputs-nonfinite", rf"NaN\. Weights .*: {UP} \(1 of"),
    "infinite": (
        lambda: fill(build("gpt2"), "lm_head.weight", math.inf, 7), "outputs-nonfinite", "transformer.wte.weight",
    ),
    "of a swapped model": (
        lambda: fill(patch_model(build("llama"), "alibi"), UP, math.nan, 0), "outputs-nonfinite", UP,
    ),
    "overflow": (
        lambda: overflowing("float16"), "outputs-nonfinite",
        r"All weights are finite, and model\.layers\.1\.mlp.* is the first module .*overflows in float16",
    ),
    "one value": (lambda: constant(build("llama")), "outputs-constant", "one value: model.embed_tokens"),
    "one value, by an encoder": (lambda: constant(build("bert")), "outputs-constant", "word_embeddings"),
    "one value, by an encoder-decoder": (
        lambda: constant(tiny_model("BartForConditionalGeneration", meta=False)), "outputs-constant", "model.shared",
    ),
    "zeros in a swapped model": (
        lambda: fill(patch_model(build("llama"), "alibi"), "lm_head.weight", 0.0), "outputs-constant", "lm_head.weight",
    ),
    "a norm of zeros": (
        lambda: fill(build("llama"), "model.norm.weight", 0.0), "outputs-constant", "No weight matrix holds one value",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_outputs_are_one_error_that_names_the_cause_and_nothing_is_compared(name: str) -> None:
    make, code, cause = BROKEN[name]
    report = check(make())
    (finding,) = [each for each in report.findings if each.severity == "error"]
    assert finding.code == code
    assert re.search(cause, f"{finding.what} {finding.do}"), finding
    assert not {"padding", "packing", "mask-ignored", "swap"} & codes(report).keys()
    assert any(f"padding and packing: with such outputs ({code})" in line for line in report.skipped)
    assert not any("against" in line and "row" in line for line in report.checked)
    if "swapped" in name:  # its modules are checked still
        assert "the swap" in report.checked


def test_broken_angles_are_the_cause_of_broken_outputs() -> None:
    model = build("llama")
    model.set_attn_implementation("eager")  # sdpa on a CPU makes 0 of NaN scores
    report = check(changed(model, lambda m: replace_angles(m, torch.full((8,), torch.nan))))
    assert [each.code for each in report.findings if each.severity == "error"] == ["angles-nonfinite"]
    assert any("outputs-nonfinite" in line for line in report.skipped)


class Never(LlamaForCausalLM):
    """A Llama that never gives some tokens, as models of images do, and may forget its mask."""

    lowest, is_deaf, nan_where_padded = -math.inf, False, False

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **inputs: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids, None if self.is_deaf else attention_mask, **inputs)
        output.logits[..., :40] = self.lowest
        if self.nan_where_padded and attention_mask is not None:
            output.logits[:, -1] = math.nan
        return output


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_tokens_that_a_class_never_gives_hide_nothing(lowest: float) -> None:
    model: Any = Never(TINY["llama"].config()).eval()
    model.lowest = lowest
    assert check(model).clean
    model.is_deaf = True
    assert "mask-ignored" in codes(check(model))


def test_outputs_that_only_padding_breaks() -> None:
    model: Any = Never(TINY["llama"].config()).eval()
    model.nan_where_padded = True
    (finding,) = [each for each in check(model).findings if each.severity == "error"]
    assert finding.code == "outputs-nonfinite"
    assert "tokens padded on the left, 97 NaN and 280 infinite: those" in finding.what


def test_a_class_that_reads_no_theta_is_found() -> None:
    assert codes(check(with_module(Fixed)))["theta-ignored"] == "error"


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 0.5},
    "yarn, mscale": {
        "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False,
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 4096,
    },
    "longrope": longrope([1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)])["rope_parameters"],
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_the_formulas_are_those_of_transformers(name: str) -> None:
    rope = DEFAULT | ROPES[name] | {"rope_type": name.partition(",")[0]}
    model = build("llama", rope_parameters=dict(rope), max_position_embeddings=128)
    settings = RopeSettings(rope, length=128)
    angles, factor = settings.angles(16), settings.attention_factor
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), angles, rtol=2e-5, atol=1e-12)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(factor)
    if name in ("dynamic", "longrope"):
        model(torch.randint(5, 97, (1, 200)))
        far = settings.angles(16, 200)
        torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), far, rtol=2e-5, atol=1e-12)
        assert check(model).clean  # the angles of a long text, in place, are no fault


def test_a_theta_that_transformers_5_drops(tmp_path: Path) -> None:
    """The symptom: the checkpoint was trained with theta 500000 and is read with 10000."""
    trained = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    tokens = torch.randint(5, 97, (1, LENGTH))
    folder = edited(tmp_path / "lost", trained, drop=("rope_parameters",), rope_base=5e5)
    lost = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.allclose(lost(tokens).logits, trained(tokens).logits, atol=0.1)
    for given in (folder, lost):
        finding = next(each for each in check(given).findings if each.code == "theta-lost")
        assert (finding.severity, finding.where) == ("error", "config.json: rope_base")
        assert "it is 500000 on disk, and the model computes with theta 10000" in finding.what
    line = re.search(r'"rope_parameters": \{.*?\}', finding.do)  # what to write, taken at its word
    assert line is not None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | json.loads(f"{{{line[0]}}}")))
    config.pop("rope_base")
    right = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(right(tokens).logits, trained(tokens).logits)


def test_a_yarn_without_an_effect(tmp_path: Path) -> None:
    """The symptom: YaRN is in the config, the outputs are those without it, and nothing says so."""
    tokens = torch.randint(5, 97, (1, LENGTH))
    plain = build("llama")
    late = build("llama")
    late.config.rope_parameters = dict(YARN)
    nothing = build("llama", rope_parameters=YARN | {"factor": 1.0})
    for model, code in ((late, "angles-differ"), (nothing, "scaling-noop")):
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
        assert code in codes(check(model))
    working = build("llama", **LONG)
    assert not torch.allclose(working(tokens).logits, plain(tokens).logits, atol=0.1)
    assert check(working).clean


def test_one_fault_is_one_error(tmp_path: Path) -> None:
    folder = edited(tmp_path / "x", drop=("rope_parameters",), rope_base=5e5)
    assert [each.code for each in check(folder).findings if each.severity == "error"] == ["theta-lost"]


def test_layer_types_are_checked_one_by_one() -> None:
    model = tiny_model("Gemma3ForCausalLM", meta=False)
    assert check(model).clean
    assert {"full_attention", "sliding_attention"} <= set(model.config.rope_parameters)
    model.config.rope_parameters["full_attention"]["rope_theta"] = 7e6
    (finding,) = [each for each in check(model).findings if each.severity == "error"]
    assert (finding.code, finding.where) == ("angles-differ", "model.rotary_emb.full_attention_inv_freq")


def test_an_inner_theta_that_is_lost(tmp_path: Path) -> None:
    folder = edited(tmp_path / "x", drop=("rope_parameters",), llm_config={"rope_theta": 5e5})
    report = check(folder)
    assert ("theta-lost", "config.json: llm_config: rope_theta") in {(f.code, f.where) for f in report.findings}


def test_a_change_that_was_meant_is_told_apart_from_a_loss(tmp_path: Path) -> None:
    changed_after = loaded_as_plain(tmp_path / "yarn", **LONG)
    finding = next(each for each in check(changed_after).findings if each.code == "scaling-lost")
    assert finding.severity == "warning"
    assert "the config was changed after loading, or another was passed" in finding.what
    folder = saved(build("llama"), tmp_path / "x")
    swapped = patch_model(LlamaForCausalLM.from_pretrained(folder), "rope", base=5e5)
    assert check(swapped).clean, check(swapped)


@pytest.mark.parametrize("name", TINY)
def test_stock_models_are_clean(name: str, tmp_path: Path) -> None:
    model = build(name)
    report = check(model)
    assert report.clean, report
    if TINY[name].stock.__module__.startswith("transformers."):
        report = check(saved(model, tmp_path / "x"))
        assert report.clean, report
        report = check(hf_posswap.load(tmp_path / "x"))
        assert report.clean, report


# what tiny_model leaves as the config has it: a factor and an original length far beyond the tiny window
CONTRADICTED = {"GptOssForCausalLM": 131072, "Ministral3ForCausalLM": 262144}


# what transformers itself cannot load again: its tiny model, saved
UNLOADABLE = {"Nemotron3_5TranscribeForConditionalGeneration"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("on_disk", [False, True])
def test_every_language_model_of_transformers_is_clean(on_disk: bool, tmp_path: Path) -> None:
    found: dict[str, list[Finding]] = {}
    for name in language_models():
        changes = {"max_position_embeddings": CONTRADICTED[name]} if name in CONTRADICTED else {}
        try:
            model = tiny_model(name, meta=False, **changes)
            given = model
            if on_disk and name not in UNLOADABLE:
                given = saved(model, tmp_path / name)
        except ImportError:  # it needs a package that is not here
            continue
        report = check(given)
        if not report.clean:
            found[name] = list(report.findings)
    assert found == {}


SWAPS = [
    ("gpt2", "rope"),
    ("gpt2", "alibi"),
    ("gpt2", "learned"),
    ("gpt2", "together"),
    ("opt", "t5"),
    ("bert", "rope"),
    ("llama", "yarn"),
    ("llama", "llama3"),
    ("llama", "longrope"),
    ("llama", "dynamic"),
    ("llama", "p_rope"),
    ("llama", "nope"),
    ("llama", "alibi"),
    ("gpt_neox", "linear"),
]
EVERY = [(name, scheme) for name in TINY for scheme in SCHEMES if (name, scheme) not in SWAPS]


def swapped_model(name: str, scheme: str) -> Any:
    model = build(name)
    options = SCHEMES.get(scheme).stand_ins(locate(model).geometry)
    return patch_model(model, scheme, **options)


@pytest.mark.parametrize(("name", "scheme"), SWAPS)
def test_swaps_are_clean(name: str, scheme: str, tmp_path: Path) -> None:
    model = swapped_model(name, scheme)
    report = check(model)
    assert report.clean, report
    assert "the swap" in report.checked
    report = check(saved(model, tmp_path / "x"))
    assert report.clean, report


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "scheme"), EVERY)
def test_every_swap_is_clean(name: str, scheme: str) -> None:
    try:
        model = swapped_model(name, scheme)
    except PosswapError:
        return
    report = check(model)
    assert report.clean, report


def test_a_swap_that_ignores_padding_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 counts from the first column by its design; a scheme of distances has no such excuse."""
    model = patch_model(build("gpt2"), "alibi")
    assert check(model).clean
    stock = model.forward

    def forward(input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, use_cache: Any = None) -> Any:
        return stock(input_ids, position_ids=position_ids, use_cache=use_cache)

    monkeypatch.setattr(model, "forward", forward)
    assert codes(check(model))["mask-ignored"] == "error"


def state_of(model: Any) -> dict[str, Any]:
    """Return all that a check may touch, comparable by ==: of tensors, the object and the values."""
    state: dict[str, Any] = {"random": torch.get_rng_state().tolist(), "config": model.config.to_dict()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inner = dict(value) if isinstance(value, dict) else {"": value}
            for key, each in inner.items():
                place = f"{path}.{name}.{key}"
                if isinstance(each, Tensor):
                    state[place] = (id(each), each.requires_grad, each.detach().double().numpy().tobytes())
                elif isinstance(each, (bool, int, float, str)) or each is None:
                    state[place] = each
                else:
                    state[place] = id(each)
    return state


def mixed(model: Any) -> Any:
    """Return `model` with its modules in mixed modes, and some of its parameters frozen."""
    model.train()
    model.get_submodule("model.layers.0").eval()
    model.get_submodule("model.layers.1.mlp").eval()
    for parameter in model.get_submodule("model.layers.1").parameters():
        parameter.requires_grad_(False)
    return model


DYNAMIC = DEFAULT | {"rope_type": "dynamic", "factor": 2.0}
LEFT: dict[str, Callable[[], Any]] = {
    "plain": lambda: build("llama"),
    "dynamic": lambda: build("llama", rope_parameters=DYNAMIC),
    "longrope": lambda: build("llama", **longrope([1.0] * 8, [2.0] * 8)),
    "swapped to dynamic": lambda: patch_model(build("llama"), "dynamic", factor=2.0),
    "swapped to longrope": lambda: swapped_model("llama", "longrope"),
    "swapped": lambda: patch_model(build("llama"), "fire"),
    "with broken weights": lambda: fill(build("llama", rope_parameters=DYNAMIC), UP, math.nan),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("raises", [False, True])
def test_the_model_is_left_as_it_was(name: str, raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixed(LEFT[name]())
    model(torch.randint(5, 97, (1, 3 * LENGTH)))  # rotary modules now hold the angles of a long text
    before = state_of(model)
    if raises:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("hf_posswap.inspection.checking.run.serving_findings", interrupt)
        with pytest.raises(KeyboardInterrupt):
            check(model)
    else:
        check(model)
    after = state_of(model)
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()


@pytest.mark.parametrize("name", ["swapped to longrope", "swapped to dynamic"])
def test_verifying_a_swap_leaves_the_model_as_it_was(name: str) -> None:
    model = mixed(LEFT[name]())
    model(torch.randint(5, 97, (1, 3 * LENGTH)))
    before = state_of(model)
    hf_posswap.verify_swap(model)
    assert state_of(model) == before


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_are_checked_with_their_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = saved(build("llama"), tmp_path / "base")
    adapted = get_peft_model(hf_posswap.load(base), LoraConfig(target_modules=["q_proj"]))
    assert check(adapted).clean
    adapted.save_pretrained(tmp_path / "adapter")
    assert check(tmp_path / "adapter").ok
    adapted.get_base_model().config.rope_parameters["rope_theta"] = 5e5
    assert codes(check(adapted))["angles-differ"] == "error"


def test_a_dynamic_scaling_that_no_text_reaches() -> None:
    model = build("llama", rope_parameters=DEFAULT | {"rope_type": "dynamic", "factor": 2.0})
    assert check(model, tokenizer=SimpleNamespace(model_max_length=64)).clean
    report = check(model, tokenizer=SimpleNamespace(model_max_length=32))
    assert codes(report)["scaling-noop"] == "warning"
    assert "model_max_length to the length that you want, e.g. 64." in str(report)


def test_the_json_that_programs_want(tmp_path: Path) -> None:
    """What a finding says to write is what `posswap export` writes."""
    folder = saved(build("llama", **LONG), tmp_path / "x")
    hf_posswap.export(folder, "vllm", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    for given in (folder, build("llama", **LONG)):
        finding = next(each for each in check(given).findings if each.where == "vllm")
        assert (finding.code, finding.severity) == ("serving", "note")
        wanted = json.loads(finding.what[finding.what.index("{") : finding.what.rindex("}") + 1])
        assert {key: written[key] for key in wanted["rope_parameters"]} == wanted["rope_parameters"]
    exported = check(tmp_path / "out")
    assert "vllm" not in {each.where for each in exported.findings}
    assert "serving" not in codes(check(saved(build("llama"), tmp_path / "plain")))


def test_encoder_decoders_are_padded_in_the_encoder() -> None:
    report = check(tiny_model("BartForConditionalGeneration", meta=False))
    assert report.clean
    assert "a row padded on the right against the row alone" in report.checked


def test_a_tokenizer_of_a_live_model() -> None:
    assert codes(check(build("gpt2"), tokenizer=SimpleNamespace(model_max_length=64)))["tokenizer-length"] == "warning"
    assert "tokenizer-length" not in codes(check(build("gpt2"), tokenizer=SimpleNamespace(model_max_length=32)))


def test_without_running_it(tmp_path: Path) -> None:
    model = build("gpt2")
    report = check(model, forward=False)
    assert "padding" not in codes(report)
    assert any("was not run" in line for line in report.skipped)
    folder = saved(build("llama", **LONG | {"rope_parameters": YARN | {"factor": 1.0}}), tmp_path / "x")
    assert "scaling-noop" in codes(check(folder, forward=False))


def test_a_large_checkpoint_is_not_loaded_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(build("llama"), tmp_path / "x")
    monkeypatch.setattr("hf_posswap.inspection.checking.run.MOST_WEIGHTS", 1000)
    report = check(folder)
    assert any("--forward" in line for line in report.skipped)
    assert not any("padded" in line for line in report.checked)
    assert any("padded" in line for line in check(folder, forward=True).checked)


def test_the_report(tmp_path: Path) -> None:
    good, bad = check(build("llama")), check(changed(build("llama"), set_rope))
    good.raise_if_errors()
    good.raise_if_errors(strict=True)
    assert good.ok
    assert "nothing found" in str(good)
    with pytest.raises(PositionCheckError, match="(?s)LlamaForCausalLM does not.*error angles-differ: .*patch_model"):
        bad.raise_if_errors()
    assert "error angles-differ: model.rotary_emb.inv_freq: the angles in force are those of plain RoPE" in str(bad)
    values = json.loads(json.dumps(bad.to_dict()))
    assert values["ok"] is False
    assert set(values["findings"][0]) == {"severity", "where", "what", "do", "code"}
    warned = check(build("llama", rope_parameters=YARN | {"factor": 1.0}))
    warned.raise_if_errors()
    assert warned.ok
    assert not warned.clean
    with pytest.raises(PositionCheckError, match="scaling-noop"):
        warned.raise_if_errors(strict=True)


VALUES = (None, 0, -1, 1, 4.0, "4", "yarn", True, [], [1.0], {}, {"a": 1}, math.nan, math.inf, 32)
TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "su", None, 7)
KEYS = (
    "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "short_factor",
    "long_factor", "mscale", "beta_fast", "full_attention", "junk", "partial_rotary_factor", "low_freq_factor",
)  # fmt: skip


def test_no_value_in_a_live_config_stops_it() -> None:
    model, chance = build("llama"), random.Random(0)
    for _ in range(40):
        rope: Any = {"rope_type": chance.choice(TYPES), "rope_theta": chance.choice((1e4, 5e5, None, "x"))}
        rope |= {chance.choice(KEYS): chance.choice(VALUES) for _ in range(chance.randint(0, 4))}
        vars(model.config)["rope_parameters"] = rope if chance.random() < 0.9 else chance.choice(VALUES)
        vars(model.config)["max_position_embeddings"] = chance.choice((32, 128, *VALUES))
        assert isinstance(check(model, forward=False), CheckReport)


def test_what_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a config.json nor"):
        check(tmp_path)
    with pytest.raises(UnsupportedSwapError, match="expected a transformers PreTrainedModel"):
        check(nn.Linear(2, 2))  # type: ignore[arg-type]


class Raising(LlamaForCausalLM):
    """A Llama that raises at inputs that it does not like."""

    disliked = "input_ids"

    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **inputs: Any) -> Any:  # type: ignore[override]
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        if given[self.disliked] is not None:
            raise RuntimeError(f"no {self.disliked}, please")
        return super().forward(input_ids, attention_mask, position_ids, **inputs)


def raising(disliked: str) -> Any:
    model: Any = Raising(TINY["llama"].config()).eval()
    model.disliked = disliked
    return model


def without_weights(folder: Path) -> Path:
    saved(build("llama"), folder)
    (folder / "model.safetensors").unlink()
    return folder


FAILED: dict[str, tuple[Make, str]] = {
    "a forward": (lambda folder: raising("input_ids"), "outputs, padding and packing: Raising .*no input_ids, please"),
    "padding": (lambda folder: raising("attention_mask"), "padding: RuntimeError: no attention_mask"),
    "packing": (lambda folder: raising("position_ids"), "packing: .*no position_ids, please"),
    "a swap": (lambda folder: patch_model(raising("input_ids"), "alibi"), "the swap: RuntimeError: no input_ids"),
    "weights": (without_weights, "the weights: there are none in .*: neither model.safetensors"),
    "loading": (
        lambda folder: without_weight(folder, "model.layers.0.mlp.up_proj.weight"), "the model: it cannot be loaded: ",
    ),
    "building": (PLANTED["theta-null"][1], "the model: none can be built, because a theta is null"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_a_check_that_could_not_run_is_listed_with_its_reason(name: str, tmp_path: Path) -> None:
    make, line = FAILED[name]
    report = check(make(tmp_path / "x"))
    assert not report.complete
    assert any(re.match(line, each) for each in report.failed), report
    assert set(report.failed) <= set(report.skipped)
    assert re.search(f"(?m)^Not checked: {line}", str(report))
    assert report.to_dict()["failed"] == list(report.failed)
    assert f"{report.source}: {'no errors in what was checked' if report.ok else 'not ok'}" in str(report)
    with pytest.raises(PositionCheckError, match=f"not checked: {line}"):
        report.raise_if_errors(strict=True)


def test_what_one_check_cannot_run_another_still_does() -> None:
    padded = "a row padded on the left against the row alone"
    packed = "a row of two documents against each alone"
    assert packed in check(raising("attention_mask")).checked
    assert padded in check(raising("position_ids")).checked


GROUPS = {
    "config_findings": "the rope settings", "setting_findings": "the rope settings for this class",
    "length_findings": "lengths", "rotary_sets": "angles", "angle_findings": "angles", "scaling_findings": "scalings",
    "theta_findings": "thetas", "key_findings": "keys of the rope settings", "table_findings": "position tables",
    "lost_findings": "config.json against the loaded config", "length_raised": "lengths",
    "generation_findings": "generation_config", "serving_findings": "what serving programs read",
    "late_scaling": "a scaling that no text reaches", "locate": "position tables and their lengths",
    "diagnose": "the files, as posswap doctor checks them", "load": "the model", "verify_swap": "the swap",
}  # fmt: skip
"""Of each function of checks, what is listed as not checked where it raises."""


@pytest.mark.parametrize("function", GROUPS)
def test_no_group_of_checks_fails_silently(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(build("llama"), tmp_path / "x")
    model: Any = folder if function in ("diagnose", "load") else hf_posswap.load(folder)
    if function == "verify_swap":
        patch_model(model, "alibi")
    assert check(model).complete

    def fail(*_: Any, **__: Any) -> Any:
        raise IndexError("for no reason")

    monkeypatch.setattr(f"hf_posswap.inspection.checking.run.{function}", fail)
    report = check(model)
    (line,) = [each for each in report.skipped if "for no reason" in each]
    assert line.startswith(f"{GROUPS[function]}: ")
    assert report.complete == (function == "serving_findings")  # which knows some classes alone


def test_every_group_of_checks_is_tried() -> None:
    used = {name for name in vars(run) if name.endswith("_findings")} - {"running_findings"}
    assert used <= GROUPS.keys()


def test_what_was_not_requested_or_does_not_apply_is_listed_and_not_failed(tmp_path: Path) -> None:
    folder = saved(build("llama"), tmp_path / "x")
    live = check(build("llama"))
    assert "config.json against the loaded config: the model was not loaded from a checkpoint" in live.skipped
    assert "the tokenizer's length: no tokenizer was given (tokenizer=)" in live.skipped
    unrun = check(folder, forward=False)
    assert "the weights: not loaded, as requested by forward=False" in unrun.skipped
    assert "the tokenizer's length: there is no tokenizer_config.json" in unrun.skipped
    assert any(line.startswith("the angles in force: ") for line in unrun.skipped)
    assert any(line.startswith("outputs, padding and packing: ") for line in unrun.skipped)
    swapped = check(patch_model(hf_posswap.load(folder), "alibi"))
    assert "config.json against the loaded config: a swap changed the config" in swapped.skipped
    assert live.complete
    assert unrun.complete
    assert swapped.complete


BUILD = """
from transformers import LlamaConfig, LlamaForCausalLM

small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**small))


def late():
    model = LlamaForCausalLM(LlamaConfig(**small))
    model.config.rope_parameters["rope_theta"] = 5e5
    return model


def raising():
    model = LlamaForCausalLM(LlamaConfig(**small))

    def refuse(*_):
        raise RuntimeError("no room")

    model.lm_head.register_forward_pre_hook(refuse)
    return model
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["check", *arguments])

    good = str(saved(build("llama"), tmp_path / "good"))
    noop = str(edited(tmp_path / "noop", rope_parameters=YARN | {"factor": 1.0}))
    lost = str(edited(tmp_path / "lost", drop=("rope_parameters",), rotary_emb_base=5e5))
    assert run(good).exit_code == 0
    assert "Nothing found." in run(good).stdout
    assert run(noop).exit_code == 0
    assert run(noop, "--strict").exit_code == 1
    shown = run(lost)
    assert shown.exit_code == 1
    assert "theta-lost" in shown.stdout
    values = json.loads(run(lost, "--json").stdout)
    assert values["ok"] is False
    assert values == json.loads(json.dumps(check(lost).to_dict()))
    for wrong in ([str(tmp_path / "none")], [], [good, "--import", "a:b"], ["--import", "my_posswap_build"]):
        result = run(*wrong)
        assert result.exit_code == 2, result
        assert result.stderr.count("\n") == 1
    (tmp_path / "my_posswap_build.py").write_text(BUILD)
    monkeypatch.chdir(tmp_path)
    assert run("--import", "my_posswap_build:model").exit_code == 0
    assert "angles-differ" in run("--import", "my_posswap_build:late").stdout
    raises = run("--import", "my_posswap_build:raising")
    assert raises.exit_code == 0
    assert "Nothing found in what was checked." in raises.stdout
    shown = " ".join(raises.stdout.split())
    assert "Not checked: outputs, padding and packing: LlamaForCausalLM cannot be run on tokens alone: no room" in shown
    assert run("--import", "my_posswap_build:raising", "--strict").exit_code == 1
    result = run("--import", "my_posswap_build:other")
    assert result.exit_code == 2
    assert "has no attribute 'other'" in result.stderr


def test_a_wrapped_forward_is_run() -> None:
    model: Any = build("llama")
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    report = check(model)
    assert report.clean, report
    assert not any("not run" in skipped for skipped in report.skipped), report.skipped
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs | {"position_ids": None})
    assert check(patch_model(build("llama"), "alibi")).clean
