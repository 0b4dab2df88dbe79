"""Plans: made without touching the model, printable, and clear about what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_posswap import Rope, Yarn, describe_positions, patch_model, plan_swap, unpatch_model
from hf_posswap.errors import (
    AlreadyPatchedError,
    NotPatchedError,
    OptionError,
    SchemeError,
    UnknownNameError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from hf_posswap.testing.tiny import tiny_model
from tests.contract.models import LENGTH, TINY, build
from tests.toys.registration import TOY_MODEL

Refused = Callable[[], Any]


def snapshot(model: PreTrainedModel) -> list[Any]:
    """Return all that a plan could have touched."""
    tensors = [(name, id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()]
    hooks = [
        (name, dict(module._forward_pre_hooks), dict(module._forward_hooks), sorted(vars(module)))
        for name, module in model.named_modules()
    ]
    return [tensors, hooks, model.config.to_dict(), id(model.config), type(model.config)]


@pytest.mark.parametrize("scheme", ["rope", "alibi", "nope", "yarn"])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "glm", "bert (is_decoder)"])
def test_a_plan_never_touches_the_model(name: str, scheme: str) -> None:
    model = build(name)
    before = snapshot(model)
    plan = plan_swap(model, scheme, max_length=2 * LENGTH)
    assert plan.edits
    str(plan)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", list(TINY))
def test_a_plan_needs_no_weights(name: str) -> None:
    if name == TOY_MODEL:  # the toy family's, not registered here
        return
    real = build(name)
    with torch.device("meta"):
        meta = type(real)(real.config)
    before = snapshot(meta)
    assert str(plan_swap(meta, "rope", max_length=64)) == str(plan_swap(real, "rope", max_length=64))
    assert snapshot(meta) == before


@pytest.mark.parametrize("scheme", ["dynamic:factor=2", "yarn:factor=2", "native + ssmax", "rope + kerple"])
def test_a_plan_is_the_same_where_meta_is_the_default_device(scheme: str) -> None:
    real = build("llama")
    with torch.device("meta"):
        plan = plan_swap(type(real)(real.config), scheme)
    assert plan == plan_swap(real, scheme)


def test_a_plan_prints_as_a_table_of_its_edits() -> None:
    text = str(plan_swap(build("gpt2"), "rope", max_length=128))
    lines = text.splitlines()
    assert lines[0].startswith("GPT2LMHeadModel: rope(base=10000.0")
    assert lines[2].split() == ["site", "path", "before", "after"]
    assert "embedding" in text
    assert "transformer.h.*.attn (2 layers)" in text
    assert "128 positions, runs beyond" in text
    assert "plugin: the saved checkpoint needs hf_posswap" in text
    assert "cached and full forward agree" in text
    assert "transformer.wpe.weight (2048 values, 8 KiB in float32)" in text
    assert "adaptation  required" in text


def test_a_plan_says_where_cached_and_full_differ() -> None:
    assert "differ beyond the original length" in str(plan_swap(build("llama"), "dynamic", factor=2.0))


def test_a_plan_is_json() -> None:
    plan = plan_swap(build("llama"), Yarn(factor=4.0))
    data = json.loads(json.dumps(plan.to_dict()))
    assert (data["route"], data["max_length"]) == ("native", 4 * LENGTH)
    assert [edit["path"] for edit in data["edits"]] == [edit.path for edit in plan.edits]


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def planted(name: str, module: nn.Module) -> PreTrainedModel:
    model = build(name)
    base = model.base_model
    base.extra = nn.Module()
    base.extra.add_module("position_table" if isinstance(module, nn.Embedding) else "second_rotary", module)
    return model


def prompt_tuned() -> Any:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(build("gpt2"), config)


REFUSALS: dict[str, tuple[Refused, type[Exception], str]] = {
    "unknown scheme": (lambda: patch_model(build("gpt2"), "ropee"), UnknownNameError, "Did you mean 'rope'"),
    "not a scheme": (lambda: patch_model(build("gpt2"), 3), SchemeError, "an object, a name or a dict, got int"),  # type: ignore[arg-type]
    "options beside an object": (
        lambda: patch_model(build("gpt2"), Rope(), base=5.0),
        OptionError,
        r"options \['base'\] were given with the scheme object",
    ),
    "unknown option": (lambda: patch_model(build("gpt2"), "alibi", base=5.0), OptionError, "has no field 'base'"),
    "length as text": (
        lambda: patch_model(build("gpt2"), "rope", max_length="64"),  # type: ignore[arg-type]
        SchemeError,
        "max_length must be a whole number of tokens >= 1, got '64'",
    ),
    "length as a truth value": (lambda: patch_model(build("gpt2"), "rope", max_length=True), SchemeError, "got True"),
    "no length": (lambda: patch_model(build("gpt2"), "rope", max_length=0), SchemeError, "got 0"),
    "half a token": (lambda: patch_model(build("gpt2"), "rope", max_length=1.5), SchemeError, "got 1.5"),  # type: ignore[arg-type]
    "unknown site": (
        lambda: patch_model(build("gpt2"), "rope", site="embedding"),  # type: ignore[arg-type]
        UnsupportedSwapError,
        "site must be 'auto' or 'attention', got 'embedding'",
    ),
    "shorter table": (
        lambda: patch_model(build("gpt2"), "learned", max_length=8),
        SchemeError,
        "max_length 8 is shorter than the model's 32 positions",
    ),
    "no table": (
        lambda: patch_model(build("llama"), "learned"),
        UnsupportedSwapError,
        "learned needs a position table, and LlamaForCausalLM has none",
    ),
    "no table, of any length": (
        lambda: patch_model(build("llama"), "learned", max_length=8),
        UnsupportedSwapError,
        "learned needs a position table, and LlamaForCausalLM has none",
    ),
    "no table for the one beside it": (
        lambda: patch_model(build("llama"), {"name": "together", "table": "learned", "inside": "alibi"}, max_length=8),
        UnsupportedSwapError,
        "learned needs a position table, and LlamaForCausalLM has none",
    ),
    "no factor": (lambda: patch_model(build("llama"), "yarn"), SchemeError, "give factor or max_length"),
    "a table in attention": (
        lambda: patch_model(build("gpt2"), "sinusoidal", site="attention"),
        UnsupportedSwapError,
        "site='attention' was requested for GPT2LMHeadModel. What works",
    ),
    "a module": (lambda: patch_model(nn.Linear(2, 2), "rope"), UnsupportedSwapError, "got Linear"),  # type: ignore[type-var]
    "a wrapped model": (
        lambda: patch_model(Wrapper(build("gpt2")), "rope"),  # type: ignore[type-var]
        UnsupportedSwapError,
        "got Wrapper; give the model itself, before wrapping",
    ),
    "a data-parallel model": (
        lambda: patch_model(nn.DataParallel(build("gpt2")), "rope"),  # type: ignore[type-var]
        UnsupportedSwapError,
        "got DataParallel",
    ),
    "a compiled model": (
        lambda: patch_model(torch.compile(build("gpt2"), backend="eager"), "rope"),
        UnsupportedSwapError,
        "before wrapping or compiling it",
    ),
    "prompt learning": (
        lambda: patch_model(prompt_tuned(), "rope"),
        UnsupportedSwapError,
        "prompt learning adds tokens without positions",
    ),
    "no family": (
        lambda: patch_model(build(TOY_MODEL), "rope"),
        UnsupportedModelError,
        "no family describes model type 'house', and its config has no rope parameters",
    ),
    "a second table": (
        lambda: patch_model(planted("gpt2", nn.Embedding(4, 4)), "rope"),
        UnsupportedModelError,
        r"'transformer.extra.position_table' \(Embedding\) looks like a part of the position mechanism",
    ),
    "a second rotary": (
        lambda: patch_model(planted("gpt2", build("llama").model.rotary_emb), "rope"),
        UnsupportedModelError,
        r"'transformer.extra.second_rotary' \(LlamaRotaryEmbedding\) looks like",
    ),
    "nothing to undo": (
        lambda: unpatch_model(build("gpt2")),
        NotPatchedError,
        "GPT2LMHeadModel carries no swap: nothing to undo",
    ),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("what", list(REFUSALS))
def test_what_is_refused_and_how_it_is_said(what: str) -> None:
    attempt, error, message = REFUSALS[what]
    with pytest.raises(error, match=message):
        attempt()


def test_a_patched_model_is_not_patched_again() -> None:
    model = build("gpt2")
    patch_model(model, "rope")
    before = snapshot(model)
    with pytest.raises(AlreadyPatchedError, match="already carries rope.*call unpatch_model"):
        patch_model(model, "alibi")
    assert snapshot(model) == before


def test_a_table_that_needs_its_weights_is_refused_on_meta() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    with pytest.raises(SchemeError, match="needs a value from the old table's weights, and this model's are on meta"):
        patch_model(model, "sinusoidal")


@pytest.mark.parametrize(
    ("model", "scheme"),
    [("bloom", "rope_2d"), ("modernbert", "self_extend"), ("modernbert", "learned"), ("t5", "nope")],
)
def test_what_works_instead_works_for_such_a_model(model: str, scheme: str) -> None:
    """A model without a table takes no table, and an encoder needs positions."""
    with pytest.raises(UnsupportedSwapError, match="What works: ") as raised:
        plan_swap(tiny_model(model), scheme)
    works = str(raised.value).partition("What works: ")[2].partition(", and ")[0].removesuffix(".")
    for other in works.replace(" and its scalings", "").split(", "):
        assert plan_swap(tiny_model(model), other).scheme.name == other


def test_a_length_of_numpy_is_planned_as_one_of_python() -> None:
    plan = plan_swap(build("gpt2"), "alibi", max_length=np.int64(64))  # type: ignore[arg-type]
    assert json.dumps(plan.to_dict()) == json.dumps(plan_swap(build("gpt2"), "alibi", max_length=64).to_dict())


def test_a_native_table_ends_in_stock_transformers_and_the_plan_says_so() -> None:
    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()
    patch_model(model, "nope")
    said = "16 positions, runs beyond with hf_posswap; in stock transformers its table ends there"
    assert dict(plan_swap(unpatch_model(model), "nope").fact_rows())["length"] == said
    assert dict(plan_swap(model, "alibi").fact_rows())["length"] == "16 positions, runs beyond"


@pytest.mark.parametrize("rope_type", ["llama3", "yarn", "longrope"])
def test_a_swap_that_takes_out_a_scaling_says_so(rope_type: str) -> None:
    """Weights may have been trained with it, and would lose that training silently."""
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": 8.0, "original_max_position_embeddings": 64}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    scaling |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope_type == "longrope" else {}
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=11,
        max_position_embeddings=512, rope_parameters=scaling | {"rope_theta": 10000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    assert "length      64 positions, 512 by the scaling in its config" in str(describe_positions(model))
    says = "The config scales its rotation from 64 to 512 positions. This swap replaces that scaling"
    for scheme in ("rope", "yarn:factor=2", "alibi", "nope"):
        assert any(says in note for note in plan_swap(model, scheme).notes), scheme
    assert plan_swap(model, "rope").adaptation.startswith("fine-tuning, if the weights were trained with the scaling")
    assert not any(says in note for note in plan_swap(model, "native + alibi").notes)
    plain = LlamaForCausalLM(LlamaConfig(**config.to_dict() | {"rope_parameters": {"rope_theta": 10000.0}}))
    assert not plan_swap(plain, "rope").notes
    assert plan_swap(plain, "rope").adaptation == "none within the original window: the same mechanism"


def test_the_same_scaling_again_takes_nothing_out() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=11,
        max_position_embeddings=512, rope_parameters=scaling,
    )  # fmt: skip
    assert not plan_swap(LlamaForCausalLM(config), "yarn:factor=8").notes
    for other in ("yarn:factor=16", "yarn:factor=8,attention_factor=1.0"):
        assert plan_swap(LlamaForCausalLM(config), other).notes
