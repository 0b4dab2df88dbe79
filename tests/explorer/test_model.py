"""What the page says of a model is what the package computes: plan, memory, operations, claims, commands."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, ViTConfig

import hf_posswap
from hf_posswap.checkpoints.exports.mechanism import position_config_of
from hf_posswap.checkpoints.exports.rules import TARGETS, judge
from hf_posswap.errors import AlreadyPatchedError, UnsupportedModelError
from hf_posswap.evaluation.cost import forward_operations, measure_cost
from hf_posswap.inspection.explorer.model import model_facts
from hf_posswap.inspection.explorer.page import render_page
from hf_posswap.schemes import make_scheme
from tests.advice.test_commands import parse

GPT2 = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=300, n_positions=64)
LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50,
    max_position_embeddings=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def page_of_gpt2() -> str:
    return render_page(model_facts(GPT2))


def test_the_costs_are_those_of_the_swapped_model() -> None:
    facts = model_facts(GPT2, make_scheme("rope"), max_length=256)
    model = hf_posswap.patch_model(GPT2LMHeadModel(GPT2).eval(), "rope", max_length=256)
    assert [cost.length for cost in facts.costs] == [64, 128, 256]
    for cost in facts.costs:
        assert cost.operations == forward_operations(model, cost.length)
        read = measure_cost(model, torch.zeros(1, cost.length, dtype=torch.long), new_tokens=1)
        assert cost.cache == read.cache_bytes  # what a real cache holds


def test_the_engines_are_those_of_the_claims() -> None:
    facts = model_facts(LLAMA, make_scheme("yarn:factor=4"))
    swapped = hf_posswap.patch_model(hf_posswap.patching.inspect.describe.on_meta(LLAMA), "yarn", factor=4)
    assert {one.target: one.verdict for one in facts.serving} == {
        target: judge(target, position_config_of(swapped.config)).verdict for target in TARGETS
    }


def test_what_to_native_makes_is_named() -> None:
    facts = model_facts(GPT2, make_scheme("rope"), max_length=256)
    found = {one.target: one for one in facts.serving}
    assert (found["vllm"].converted, found["vllm"].verdict) == ("GPTNeoXForCausalLM", "exact")
    assert (found["transformers"].converted, found["transformers"].verdict) == ("", "exact")


@pytest.mark.parametrize("scheme", [None, "yarn:factor=4", "self_extend", "rope:base=500000"])
def test_the_commands_are_taken(scheme: str | None) -> None:
    chosen = None if scheme is None else make_scheme(scheme)
    how = {} if scheme is None or "factor" in scheme else {"max_length": 512}
    facts = model_facts(LLAMA, chosen, written=scheme, **how)
    assert facts.commands
    for command in facts.commands:
        posswap, *words = shlex.split(command)
        assert posswap == "posswap"
        parse(words)


def test_a_refused_swap_is_said() -> None:
    facts = model_facts(BertConfig(num_hidden_layers=1), make_scheme("nope"))
    assert facts.explanation.refusal is not None
    page = render_page(facts)
    assert "refused: nope needs a causal model" in page
    assert facts.serving == ()


def test_without_a_scheme_every_scheme_is_listed(page_of_gpt2: str) -> None:
    assert "Each scheme in this model" in page_of_gpt2
    assert all(f"<td>{name}</td>" in page_of_gpt2 for name in hf_posswap.explain(GPT2).schemes)


def test_a_scheme_that_needs_the_weights_is_planned_all_the_same() -> None:
    facts = model_facts(GPT2, make_scheme("learned:extend=tile"), max_length=256)
    assert facts.explanation.plan is not None
    assert facts.length == 256


def test_a_model_of_images_is_refused_and_says_where_to_look() -> None:
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8)
    for scheme in (None, make_scheme("rope_2d")):
        with pytest.raises(UnsupportedModelError, match=r"reads images.* posswap explain .* without --html"):
            model_facts(config, scheme)


def test_a_swapped_model_shows_its_swap(tmp_path: Path) -> None:
    model = hf_posswap.patch_model(GPT2LMHeadModel(GPT2), "rope", max_length=256)
    hf_posswap.save(model, tmp_path / "swapped")
    facts = model_facts(str(tmp_path / "swapped"))
    assert facts.explanation.report.swapped is not None
    assert "swapped to" in render_page(facts)
    with pytest.raises(AlreadyPatchedError):
        model_facts(str(tmp_path / "swapped"), make_scheme("alibi"))


def test_the_page_needs_nothing_from_elsewhere(page_of_gpt2: str) -> None:
    head = page_of_gpt2.partition("</head>")[0]
    assert "default-src &#x27;none&#x27;" in head
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in page_of_gpt2.replace("http://www.w3.org/2000/svg", "").replace("url(#", "")
