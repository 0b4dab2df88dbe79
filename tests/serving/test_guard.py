"""What the plugin of vLLM refuses, and why: judged from the plan alone, with or without vLLM."""

from __future__ import annotations

import functools
import importlib
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from hf_posswap import patch_model, plan_swap
from hf_posswap.checkpoints.exports.mechanism import position_config_of
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.integrations.vllm.guard import (
    OVERRIDE,
    head_name,
    head_problem,
    install_guard,
    length_problem,
    refuse_unservable,
    rope_problem,
    version_problem,
)
from hf_posswap.integrations.vllm.plugin import register
from hf_posswap.patching.inspect.describe import describe_positions, stand_ins
from hf_posswap.patching.inspect.paged import paged_problem, plan_needs_own_attention
from hf_posswap.schemes.base import schemes_for
from hf_posswap.testing.tiny import tiny_model
from tests.contract.models import LENGTH, build

ROOT = Path(__file__).resolve().parents[2]
OWN = {"fire", "kerple", "t5", "dual_chunk", "leaky_rerope", "rerope", "self_extend", "string"}
FOLLOWING = {"dynamic", "longrope"}


def served(model: Any, **changes: Any) -> Any:
    """Return what the guard reads of vLLM's config for a swapped `model`."""
    values = {
        "hf_config": model.config,
        "architecture": model.config.architectures[0],
        "runner_type": "generate",
        "max_model_len": LENGTH,
        "dtype": torch.float32,
        "is_moe": False,
        "use_mla": False,
        "using_transformers_backend": lambda: False,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**values | changes),
        parallel_config=SimpleNamespace(world_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
    )


def swapped(name: str, scheme: str, **options: Any) -> Any:
    model = patch_model(build(name), scheme, **options)
    model.config.architectures = [type(model).__name__]
    return model


def test_each_scheme_is_served_or_refused_by_name() -> None:
    model = build("gpt2")
    geometry = describe_positions(model).geometry
    plans = {name: plan_swap(model, name, **stand_ins(name, geometry)) for name in schemes_for("text")}
    plans = {name: plan for name, plan in plans.items() if plan.route == "plugin"}
    problems = {name: problem for name, plan in plans.items() if (problem := paged_problem(plan)) is not None}
    assert problems.keys() == FOLLOWING | {"blend"}
    assert all(problems[name].startswith(f"the angles of {name} follow the length of the whole") for name in FOLLOWING)
    assert "finish_blend" in problems["blend"]
    assert {name for name, plan in plans.items() if plan_needs_own_attention(plan)} - problems.keys() == OWN
    for name in FOLLOWING:
        plan = plan_swap(model, name, **stand_ins(name, geometry), follow="query")
        assert (paged_problem(plan), plan_needs_own_attention(plan)) == (None, True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bloom", "the attention of BloomForCausalLM does not use"),
        ("BertForMaskedLM", "BertForMaskedLM is not a text-only decoder"),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(kind: str, words: str) -> None:
    assert words in str(paged_problem(plan_swap(tiny_model(kind), "alibi")))


def test_a_pinned_longrope_is_served() -> None:
    plan = plan_swap(build("gpt2"), "longrope", long_factor=[2.0] * 8, factor=2.0, pin=2 * LENGTH)
    assert paged_problem(plan) is None


def test_lengths_that_a_dtype_does_not_hold_are_refused() -> None:
    plan = plan_swap(build("llama"), "xpos", max_length=20_000)
    assert length_problem(plan, 20_000, torch.bfloat16) is None
    assert length_problem(plan, LENGTH, torch.float32) is None
    assert "too long: xpos: a position lies" in str(length_problem(plan, 20_000, torch.float16))
    assert length_problem(plan, 20_001, torch.float32) == (
        "it is made for 20000 tokens, and has an end: give --max-model-len 20000"
    )


def test_a_stock_rotation_that_follows_the_length_is_refused_beyond_the_original_one() -> None:
    dynamic = position_config_of(patch_model(build("llama"), "dynamic", factor=4.0).config)
    lists = position_config_of(patch_model(build("llama"), "longrope", factor=4.0, long_factor=[2.0] * 8).config)
    fixed = position_config_of(patch_model(build("llama"), "yarn", factor=4.0).config)
    assert rope_problem(dynamic, LENGTH, is_own=True) is None
    assert "swap to yarn or ntk" in str(rope_problem(dynamic, LENGTH + 1, is_own=True))
    assert rope_problem(lists, LENGTH + 1, is_own=True) is None
    assert "pin=LENGTH" in str(rope_problem(lists, LENGTH + 1, is_own=False))
    assert rope_problem(fixed, 4 * LENGTH, is_own=False) is None


def test_a_head_that_does_more_is_refused() -> None:
    config = transformers.GraniteConfig(logits_scaling=4.0)
    assert "GraniteForCausalLM does more to its logits" in str(head_problem(transformers.GraniteForCausalLM, config))
    config = transformers.GraniteConfig(logits_scaling=8)
    assert type(config.logits_scaling) is int
    assert "GraniteForCausalLM does more to its logits" in str(head_problem(transformers.GraniteForCausalLM, config))
    assert head_problem(transformers.GraniteForCausalLM, transformers.GraniteConfig()) is None
    assert head_problem(transformers.CohereForCausalLM, transformers.CohereConfig(logit_scale=0.1)) is None
    bert = tiny_model("BertLMHeadModel", is_decoder=True)
    assert "BertLMHeadModel does more to its logits" in str(head_problem(type(bert), bert.config))
    assert head_name(transformers.BioGptForCausalLM) == "output_projection"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "TransformersForCausalLM"}, "leave --model-impl and --hf-overrides out"),
        ({"runner_type": "pooling"}, "for generating text alone"),
        ({"is_moe": True}, "experts and latent attention"),
    ],
)
def test_options_that_would_leave_the_swap_out_are_refused(changes: dict[str, Any], words: str) -> None:
    model = swapped("llama", "alibi")
    with pytest.raises(UnsupportedSwapError, match=words):
        refuse_unservable(served(model, **changes), "0.32.0")
    refuse_unservable(served(model), "0.32.0")


def test_several_devices_are_refused() -> None:
    config = served(swapped("llama", "alibi"))
    config.parallel_config.world_size = 2
    with pytest.raises(UnsupportedSwapError, match="one device alone"):
        refuse_unservable(config, "0.32.0")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"cache_config": SimpleNamespace(cache_dtype="fp8_e4m3")}, "not in fp8_e4m3: leave --kv-cache-dtype out"),
        ({"speculative_config": SimpleNamespace()}, "leave --speculative-config out"),
        ({"device_config": SimpleNamespace(device_type="cuda")}, "CPU build alone so far, and this one runs on cuda"),
    ],
)
def test_options_that_its_own_attention_has_not_are_refused(
    option: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, own = served(swapped("llama", "alibi")), served(swapped("llama", "kerple"))
    refuse_unservable(own, "0.32.0")
    for config in (plain, own):
        vars(config).update(option)
    refuse_unservable(plain, "0.32.0")
    with pytest.raises(UnsupportedSwapError, match=words):
        refuse_unservable(own, "0.32.0")
    if "device_config" in option:
        monkeypatch.setenv(OVERRIDE, "1")
        refuse_unservable(own, "0.32.0")


def test_a_version_that_was_not_tested_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = served(swapped("llama", "alibi"))
    with pytest.raises(UnsupportedSwapError, match=r"this vLLM is 9.9.1, and hf_posswap has been tested with"):
        refuse_unservable(config, "9.9.1")
    monkeypatch.setenv(OVERRIDE, "1")
    refuse_unservable(config, "9.9.1")


@pytest.mark.parametrize(
    ("version", "known"), [("0.32.0", True), ("0.32.1+cu129", True), ("0.9.2", False), ("dev", False)]
)
def test_versions_are_told_apart(version: str, known: bool) -> None:
    assert (version_problem(version) is None) == known


def test_other_models_are_none_of_its_business() -> None:
    refuse_unservable(SimpleNamespace(model_config=SimpleNamespace(hf_config=build("llama").config)), "9.9.1")


def test_the_entry_point_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["posswap"].partition(":")
    assert getattr(importlib.import_module(module), name) is register


def test_where_vllm_is_not_what_it_was_swapped_checkpoints_stay_unknown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="99"))
    register()
    assert "cannot serve swapped checkpoints in this vLLM: they stay refused" in caplog.text


def test_the_guard_is_installed_once_around_a_method_that_others_have_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is not installed here: its two names that the guard touches stand in for it."""

    class VllmConfig:
        model_config = None
        calls = 0

        def try_verify_and_update_config(self) -> None:
            self.calls += 1

    wrapped = functools.wraps(VllmConfig.try_verify_and_update_config)(lambda self: None)
    VllmConfig.try_verify_and_update_config = wrapped  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(VllmConfig=VllmConfig))
    install_guard()
    guarded = VllmConfig.try_verify_and_update_config
    assert guarded is not wrapped
    install_guard()
    assert VllmConfig.try_verify_and_update_config is guarded
