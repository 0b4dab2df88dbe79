"""Tiny twins: sizes cut, switches kept; and the checks, which a model that breaks a promise fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_posswap.testing.tiny import tiny_model
from hf_posswap.testing.twin import build_twin, fill_zeros, isolated, twin_config
from hf_posswap.testing.twin_checks import Expectations, TwinChecks

ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 96 for i in range(48)],
        "long_factor": [1.0 + i for i in range(48)], "original_max_position_embeddings": 4096}  # fmt: skip
LIVE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPT2LMHeadModel": ({"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_by_inverse_layer_idx": True}),
    "LlamaForCausalLM": (
        {"rope_parameters": ROPE, "num_key_value_heads": 8, "max_position_embeddings": 131072, "attention_bias": True},
        {"rope_parameters": ROPE, "num_key_value_heads": 2, "max_position_embeddings": 131072, "attention_bias": True},
    ),
    "Phi3ForCausalLM": (
        {"rope_parameters": LONG, "max_position_embeddings": 131072, "sliding_window": 2047},
        {"max_position_embeddings": 131072, "sliding_window": 8},
    ),
    "MistralForCausalLM": ({"sliding_window": None}, {"sliding_window": None, "num_key_value_heads": 2}),
    "GemmaForCausalLM": ({"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
    "Gemma3ForCausalLM": ({}, {"layer_types": ["sliding_attention", "full_attention"]}),
    "GPTNeoForCausalLM": ({}, {"attention_layers": ["global", "local"], "window_size": 8}),
    "FalconForCausalLM": ({"new_decoder_architecture": True, "num_kv_heads": 8}, {"num_kv_heads": 2}),
    "RobertaForMaskedLM": ({}, {"pad_token_id": 1}),
    "OPTForCausalLM": ({"word_embed_proj_dim": 512, "hidden_size": 1024}, {"word_embed_proj_dim": 32}),
    "BartForConditionalGeneration": ({}, {"encoder_layers": 2, "decoder_layers": 2}),
}
"""Fields of configs of the usual sizes, and of their twins."""


@pytest.mark.parametrize("name", LIVE)
def test_a_twin_has_cut_sizes_the_models_switches_and_runs(name: str) -> None:
    given, expected = LIVE[name]
    cls: Any = getattr(transformers, name)
    config = cls.config_class(**given)
    before = config.to_dict()
    twin = twin_config(config)
    assert config.to_dict() == before
    assert {field: getattr(twin, field) for field in expected} == expected
    switches = {k: v for k, v in before.items() if isinstance(v, bool | str) and not k.startswith("_")}
    assert {field: twin.to_dict()[field] for field in switches} == switches
    with isolated():
        model = build_twin(lambda: cls(twin))
        assert sum(weight.numel() for weight in model.parameters()) < 1_000_000
        tried = TwinChecks(model, Expectations(causal="Causal" in name or "LMHead" in name))
        assert tried.finite() is None
        assert "cached steps" not in tried.checks() or tried.cached() is None


def test_factors_by_pair_are_thinned_out_with_the_pairs() -> None:
    config = transformers.Phi3Config(rope_parameters=LONG, max_position_embeddings=131072)
    rope = config.rope_parameters | {name: LONG[name][::6] for name in ("short_factor", "long_factor")}
    assert twin_config(config).rope_parameters == rope  # 48 pairs of 96 dimensions, and 8 of 16


def test_all_layers_stay_where_that_is_asked() -> None:
    config = transformers.Gemma3TextConfig()
    assert twin_config(config, all_layers=True).layer_types == config.layer_types


class Broken(transformers.LlamaForCausalLM):
    """A Llama that breaks what `fault` names."""

    fault = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.fault == "cache" and kwargs.get("use_cache"):
            cut = {name: None for name in ("cache", "past_key_values") if name in kwargs}
            return super().forward(*args, **kwargs | cut)
        if self.fault == "mask":
            kwargs["attention_mask"] = None
        if self.fault == "ids":
            kwargs["position_ids"] = None
        out = super().forward(*args, **kwargs)
        if self.fault == "gradient":
            out["logits"] = out["logits"] + 0 * (out["logits"] - out["logits"].detach()).sqrt()
        if self.fault == "finite":
            out["logits"] = out["logits"] / 0
        if self.fault == "table":  # the ids count from the start
            out["logits"] = out["logits"] + kwargs.get("position_ids", torch.zeros(1, 1))[..., None]
        return out


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("", set()),
        ("cache", {"cached steps", "cached steps of a padded row", "cached steps at given position ids"}),
        ("mask", {"padding"}),
        ("ids", {"skipped position ids"}),
        ("gradient", {"gradients"}),
        ("finite", {"a forward"}),
        ("table", {"shifted position ids"}),
    ],
)
def test_each_check_finds_its_fault(fault: str, failing: set[str]) -> None:
    with isolated():
        model = build_twin(lambda: Broken(twin_config(tiny_model("llama").config)))
        model.fault = fault
        paths = [f"model.layers.{layer}.self_attn" for layer in range(model.config.num_hidden_layers)]
        expected = Expectations(True, paths, takes_ids=True, relative=True, sees_positions=True)
        failed = {name for name, check in TwinChecks(model, expected).checks().items() if check() is not None}
    assert failed >= failing
    assert bool(failed) == bool(fault)


def test_a_weight_inside_attention_without_a_gradient_is_found() -> None:
    with isolated():
        model = build_twin(lambda: tiny_model("gpt2", meta=False))
        model.transformer.h[0].attn.extra = nn.Linear(2, 2)
        expected = Expectations(True, ["transformer.h.0.attn"])
        problem = TwinChecks(model, expected).gradients()
        assert problem == "transformer.h.0.attn.extra.weight has no gradient"
        unused = Expectations(True, ["transformer.h.0.attn"], frozenset({"transformer.h.0.attn.extra.weight"}))
        assert TwinChecks(model, unused).gradients() is None


def test_attention_to_padding_is_told_from_what_else_sees_it() -> None:
    """ConvBERT convolves padding too: its padded rows differ, and it attends to no padding unless the mask is lost."""
    model = tiny_model("ConvBertForMaskedLM", meta=False)
    checks = TwinChecks(model, Expectations(causal=False))
    assert checks.padded() is not None
    assert checks.padding_unattended() is None

    def lose(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(one for one in args if not torch.is_tensor(one) or one.ndim != 4), kwargs | {
            "attention_mask": None
        }

    model.convbert.encoder.layer[1].register_forward_pre_hook(lose, with_kwargs=True)
    problem = TwinChecks(model, Expectations(causal=False)).padding_unattended()
    assert problem is not None
    assert problem.startswith("tokens attend to padding on the right in layer 1")


def test_a_twin_runs_in_one_thread_and_other_threads_keep_theirs() -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        with isolated():
            assert torch.get_num_threads() == 1
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))  # starts while a twin runs
            other.start()
            other.join()
        assert seen == [3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_gradients_can_be_asked_for_twice_and_of_what_a_forward_needs_none_for() -> None:
    with isolated():
        model = build_twin(lambda: tiny_model("gpt2", meta=False))
        checks = TwinChecks(model, Expectations(True, ["transformer.h.0.attn"]))
        assert checks.gradients() is None
        assert checks.gradients() is None
        native = model.forward
        model.forward = lambda **given: native(**given) if not torch.is_grad_enabled() else 1 / 0
        checks = TwinChecks(model, Expectations(True, ["transformer.h.0.attn"]))
        assert checks.finite() is None
        with pytest.raises(ZeroDivisionError):
            checks.gradients()


def test_only_zeros_are_filled() -> None:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.zero_()
    before = module.bias.clone()
    fill_zeros(module, ["weight", "bias"])
    assert bool(module.weight.all())
    assert torch.equal(module.bias, before)
