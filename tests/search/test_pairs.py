"""The 2-norm selection of rotary pairs, against what hooks on the projections see and plain loops over weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, LlamaForCausalLM

from hf_posswap import patch_model, swap_plan, verify_swap
from hf_posswap.errors import (
    AlreadyPatchedError,
    DataError,
    SchemeError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.training.search import rank_pairs, select_pairs
from tests.search.conftest import COMMON, ORIGINAL, WORDS, llama_config

Build = Callable[..., Any]
TOKENS = [list(range(1, 12)), list(range(20, 36))]


class Packed(torch.Tensor):
    """A weight of another class, as torchao's are."""


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return LlamaForCausalLM(llama_config(**heads | changes)).eval()


def outputs(model: Any, name: str) -> dict[int, list[torch.Tensor]]:
    """Return what each layer's projection called `name` gave for each of TOKENS, [Q, heads D]."""
    seen: dict[int, list[torch.Tensor]] = {}
    handles = []
    for index, layer in enumerate(model.model.layers):

        def hook(_module: Any, _inputs: Any, out: torch.Tensor, index: int = index) -> None:
            seen.setdefault(index, []).append(out[0])

        handles.append(getattr(layer.self_attn, name).register_forward_hook(hook))
    with torch.no_grad():
        for row in TOKENS:
            model(input_ids=torch.tensor([row]))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("name", "layout"), [("llama", "half"), ("glm", "interleaved")])
def test_norms_are_the_mean_over_all_pairs_of_a_query_and_a_key(build: Build, name: str, layout: str) -> None:
    model = llama() if name == "llama" else build("glm")
    found = rank_pairs(model, TOKENS)
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    width = model.config.head_dim if name == "llama" else model.config.head_dim // 2  # GLM rotates half of it
    queries, keys = outputs(model, "q_proj"), outputs(model, "k_proj")
    assert found.shape == (2, groups, width // 2)
    for layer, group, pair in itertools.product(range(2), range(groups), range(width // 2)):
        two = [pair, pair + width // 2] if layout == "half" else [2 * pair, 2 * pair + 1]
        key = torch.cat(keys[layer]).double().unflatten(-1, (groups, -1))[:, group, two]
        total = 0.0
        for head in range(group * heads // groups, (group + 1) * heads // groups):
            query = torch.cat(queries[layer]).double().unflatten(-1, (heads, -1))[:, head, two]
            products = [(q.norm() * k.norm()).item() for q, k in itertools.product(query, key)]
            total += sum(products) / len(products)
        assert found[layer, group, pair].item() == pytest.approx(total, rel=1e-5)


def test_by_weights_they_are_the_norms_of_the_rows() -> None:
    model = llama()
    found = rank_pairs(model)
    for layer, group, pair in itertools.product(range(2), range(2), range(4)):
        attention = model.model.layers[layer].self_attn

        def norm(weight: torch.Tensor, head: int, pair: int = pair) -> float:
            return sum(weight[8 * head + row].double().square().sum().item() for row in (pair, pair + 4)) ** 0.5

        queries = sum(norm(attention.q_proj.weight, head) for head in (2 * group, 2 * group + 1))
        expected = queries * norm(attention.k_proj.weight, group)
        assert found[layer, group, pair].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rope", [{}, {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3}])
def test_the_model_reads_as_it_always_does_and_is_left_as_it_was(rope: dict[str, Any]) -> None:
    values = {"rope_type": "default", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, **rope}
    if not rope:
        del values["original_max_position_embeddings"]
    model = llama(rope_parameters=values).train()
    with torch.no_grad():
        before = model(torch.tensor([TOKENS[1]])).logits
    config = model.config.to_dict()
    found = rank_pairs(model, TOKENS)
    second = torch.cat(outputs(model, "k_proj")[1]).double().unflatten(-1, (2, 8))[:, 0, [1, 5]].norm(dim=-1).mean()
    query = torch.cat(outputs(model, "q_proj")[1]).double().unflatten(-1, (4, 8))[:, :2][..., [1, 5]]
    expected = query.norm(dim=-1).mean(0).sum() * second
    assert found[1, 0, 1].item() == pytest.approx(expected.item(), rel=1e-5)  # layer 1 saw layer 0 turn as ever
    assert model.training
    assert model.config.to_dict() == config
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([TOKENS[1]])).logits, before)


@pytest.mark.parametrize("tokens", [None, TOKENS])
def test_pairs_that_are_silent_are_not_kept(tokens: Any) -> None:
    model = llama()
    loud = {(0, 0): [1, 3], (0, 1): [0, 2], (1, 0): [2, 3], (1, 1): [0, 1]}
    with torch.no_grad():
        for (layer, group), kept in loud.items():
            key = model.model.layers[layer].self_attn.k_proj.weight.view(2, 8, -1)
            silent = [row for pair in range(4) if pair not in kept for row in (pair, pair + 4)]
            key[group, silent] *= 1e-3
    chosen = select_pairs(model, 0.5, tokens)
    assert {(layer, g): list(chosen[layer].select[g]) for layer in (0, 1) for g in (0, 1)} == loud  # type: ignore[index]


def test_the_selection_goes_into_the_model_layer_by_layer() -> None:
    model, ids = llama(), torch.tensor([TOKENS[1]])
    chosen = select_pairs(model, 0.5, TOKENS)
    plan = swap_plan(patch_model(model, chosen))  # type: ignore[arg-type]
    assert (plan.route, plan.scheme.name) == ("plugin", "per_layer")
    verify_swap(model)
    whole, plain = llama(), llama()
    patch_model(whole, select_pairs(whole, 1.0))  # type: ignore[arg-type]
    with torch.no_grad():
        assert (model(ids).logits - plain(ids).logits).abs().max() > 1e-3
        torch.testing.assert_close(whole(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)  # every pair turns


def test_heads_may_share_their_pairs() -> None:
    model = llama()
    chosen = select_pairs(model, 0.5, TOKENS, by_head=False)
    norms = rank_pairs(model, torch.tensor([TOKENS[0], TOKENS[1][:11]]))
    assert norms.shape == (2, 2, 4)
    norms = rank_pairs(model, TOKENS).sum(dim=1)
    for layer in (0, 1):
        kept = list(chosen[layer].select)
        left_out = [pair for pair in range(4) if pair not in kept]
        assert len(kept) == 2
        assert norms[layer, kept].min() >= norms[layer, left_out].max()  # type: ignore[index]


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize(("share", "kept"), [(0.25, 1), (0.49, 1), (0.5, 2), (0.75, 3), (1, 4)])
def test_as_many_are_kept_as_the_share_says(share: float, kept: int, by_head: bool) -> None:
    for scheme in select_pairs(llama(), share, by_head=by_head).values():
        lists: Any = scheme.select if by_head else [scheme.select]
        assert [len(chosen) for chosen in lists] == [kept] * len(lists)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"share": 0.0}, SchemeError, "select_pairs: share must be a finite number > 0 and <= 1, got 0.0"),
        ({"share": 0.2}, SchemeError, "select_pairs: share=0.2 of this model's 4 rotary pairs is none; give a larger"),
        ({"share": 0.5, "by_head": 1}, SchemeError, "select_pairs: by_head must be True or False, got 1"),
        ({"share": 0.5, "tokens": "text"}, DataError, "tokens must be rows of token ids, one per text, got str 'text'"),
        ({"share": 0.5, "tokens": []}, DataError, "tokens must be rows of token ids, one per text, got list"),
        ({"share": 0.5, "tokens": [[]]}, DataError, r"tokens\[0\] must be a row of whole token ids, got list \[\]"),
        ({"share": 0.5, "tokens": [["a"]]}, DataError, r"tokens\[0\] must be a row of whole token ids"),
        ({"share": 0.5, "tokens": [[1], [WORDS]]}, DataError, f"the tokens run from {WORDS} to {WORDS}"),
        ({"share": 0.5, "tokens": [[1] * 17]}, DataError, r"tokens\[0\] has 17 tokens, and the model's length is 16"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        select_pairs(llama(), **options)


def test_models_that_have_no_pairs_to_rank(build: Build) -> None:
    with pytest.raises(UnsupportedSwapError, match="BertLMHeadModel has a position table and no rotary pairs to rank"):
        rank_pairs(BertLMHeadModel(BertConfig(**COMMON, is_decoder=True)))
    with pytest.raises(UnsupportedSwapError, match=r"layers.0.attention has no plain q_proj, so its pairs cannot be"):
        rank_pairs(build("neox"))
    assert rank_pairs(build("neox"), TOKENS).shape == (2, 2, 4)  # one projection for all: tokens tell them apart
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config())
    with pytest.raises(UnsupportedModelError, match="ranking pairs needs the model's weights, and these are on meta"):
        rank_pairs(model)
    model = llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(SchemeError, match="the rotation of LlamaForCausalLM depends on the length of its input"):
        rank_pairs(model, TOKENS)
    patch_model(model, "nope")
    with pytest.raises(AlreadyPatchedError, match="already carries nope"):
        rank_pairs(model)


def test_a_model_some_of_whose_layers_do_not_rotate_is_refused() -> None:
    with pytest.raises(UnsupportedSwapError, match=r"layers 3 of SmolLM3ForCausalLM do not rotate, so they have no"):
        select_pairs(tiny_model("smollm3", meta=False), 0.5)


def test_weights_that_are_quantized_are_not_ranked_but_queries_are() -> None:
    model = llama()
    expected = rank_pairs(model, TOKENS)
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().as_subclass(Packed))
    with pytest.raises(UnsupportedSwapError, match=r"has no plain q_proj, .*give tokens to rank them by"):
        rank_pairs(model)
    assert torch.equal(rank_pairs(model, TOKENS), expected)
