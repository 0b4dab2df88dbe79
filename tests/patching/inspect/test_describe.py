"""What a model has now and what could stand there: from a model, a config, a folder, with and without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posswap import (
    describe_positions,
    explain,
    list_families,
    list_schemes,
    patch_model,
    plan_swap,
    supports,
    swap_plan,
    unpatch_model,
)
from hf_posswap.errors import (
    AlreadyPatchedError,
    CheckpointError,
    OptionError,
    UnknownNameError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from hf_posswap.families import FAMILIES
from hf_posswap.schemes import SCHEMES, make_scheme, schemes_for
from tests.contract.models import LENGTH, TINY, build
from tests.contract.pairs import Pair, refusal
from tests.toys.registration import TOY_MODEL, registered

MODELS = [name for name in TINY if name != TOY_MODEL]


def test_a_native_model_is_described() -> None:
    report = describe_positions(build("gpt2"))
    assert (report.native, report.swapped, report.limit) == ("learned table, 32 positions", None, LENGTH)
    assert report.sites["embedding"] == "transformer.wpe"
    assert "2 layers, 4 heads (4 kv) of 16, hidden 64, causal" in str(report)
    rotary = describe_positions(build("gpt_neox"))
    assert rotary.native == "rope, theta 10000, 8 of 16 dims a head, half layout, type default"
    assert describe_positions(build("glm")).geometry.layout == "interleaved"
    assert "bidirectional" in str(describe_positions(build("bert")))


@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_model_says_what_it_carries_and_forgets_it(name: str) -> None:
    model = build(name)
    before = describe_positions(model)
    patch_model(model, "alibi", max_length=64)
    report = describe_positions(model)
    assert (report.swapped, report.limit) == ("alibi", 64)
    assert report.native == before.native.removesuffix(", type default")
    assert json.loads(json.dumps(report.to_dict()))["swapped"] == "alibi"
    assert describe_positions(unpatch_model(model)) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_explain_says_of_every_scheme_what_patching_would_do(name: str) -> None:
    found = explain(build(name))
    assert list(found.schemes) == list(schemes_for("text"))
    for scheme, what in found.schemes.items():
        why = refusal(Pair(name, scheme))
        assert what == (f"no: {why}" if why else Pair(name, scheme).plan.route), scheme
        assert supports(build(name).config, scheme) == (why is None)


def test_explain_is_the_same_from_model_config_folder_and_meta(tmp_path: Path) -> None:
    model = build("llama")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)  # no weights
    with torch.device("meta"):
        meta = type(model)(model.config)
    sources = [model, model.config, tmp_path, str(tmp_path), meta]
    assert len({str(explain(source, "yarn", factor=4.0)) for source in sources}) == 1
    data = json.loads(json.dumps(explain(tmp_path, "yarn", factor=4.0).to_dict()))
    assert data["plan"]["route"] == "native"


def test_explain_gives_a_refusal_as_an_answer() -> None:
    found = explain(build("bert").config, "nope")
    assert found.plan is None
    assert "needs a causal model" in str(found.refusal)
    assert str(found).endswith(f"refused: {found.refusal}")


def test_explain_reads_a_swapped_checkpoint(tmp_path: Path) -> None:
    model = build("gpt2")
    patch_model(model, "rope", max_length=64)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # no weights are needed
    found = explain(tmp_path)
    assert found.report.swapped is not None
    assert found.report.swapped.startswith("rope(")
    with pytest.raises(AlreadyPatchedError, match="already carries rope"):
        explain(tmp_path, "alibi")


def test_what_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config \(config.json\): (?!there is no)"):
        explain(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder here, and the Hub"):
        explain(tmp_path / "mistyped")
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(CheckpointError, match="holds no readable model config"):
        explain(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no family describes model type 'house'"):
        explain(TINY[TOY_MODEL].config())


def test_supports_does_not_swallow_mistakes() -> None:
    config = TINY["gpt2"].config()
    with pytest.raises(UnknownNameError, match="Did you mean 'alibi'"):
        supports(config, "alibbi")
    with pytest.raises(OptionError, match="no field 'slope'"):
        supports(config, "alibi", slope=1)
    assert not supports(TINY[TOY_MODEL].config(), "rope")


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("ALiBi", {}),
        ("yarn:factor=4", {}),
        ("YaRN:base=500,factor=4", {}),
        ("yarn:base=500", {}),
        ("NTK-by-parts", {"factor": 4.0}),
        ({"rope_type": "yarn", "factor": 4.0}, {}),
        ({"name": "alibi"}, {}),
    ],
)
def test_every_function_reads_a_scheme_alike(text: Any, fields: dict[str, Any]) -> None:
    """A name in any spelling, with fields or without, transformers' rope_parameters, and a scheme's own dict."""
    model = build("llama")
    assert supports(model, text, **fields)
    given = {"factor": 2.0} if text == "yarn:base=500" else fields
    plan = explain(model, text, **given).plan
    assert plan is not None
    assert plan == plan_swap(model, text, **given)
    assert swap_plan(patch_model(model, text, **given)) == plan
    assert plan.scheme == plan_swap(build("llama"), make_scheme(text, **given)).scheme


def test_a_scheme_and_a_family_are_listed_as_soon_as_they_are_registered() -> None:
    assert set(list_schemes()) == {*SCHEMES}
    assert set(list_families()) == set(FAMILIES)
    before = list_schemes(), list_families()
    with registered():
        assert set(list_schemes()) - set(before[0]) == {"window-toll"}
        assert set(list_families()) - set(before[1]) == {TOY_MODEL}
        assert supports(TINY[TOY_MODEL].config(), "window-toll")
    assert (list_schemes(), list_families()) == before


def test_a_refused_pair_is_refused_by_every_way_of_asking() -> None:
    model = build("llama")
    assert not supports(model, "sinusoidal")
    assert explain(model, "sinusoidal").refusal == refusal(Pair("llama", "sinusoidal"))
    with pytest.raises(UnsupportedSwapError, match="has none. What works"):
        patch_model(model, "sinusoidal")
