"""Biases fitted to what a table or a rotation does, against models of known profiles and least squares written out."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForCausalLM,
    BartModel,
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RoFormerConfig,
    RoFormerForMaskedLM,
)

import hf_posswap
from hf_posswap import Alibi, Kerple, PerLayer, T5Bias, patch_model, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import (
    AlreadyPatchedError,
    DataError,
    NumericError,
    SchemeError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from hf_posswap.families.locating import locate
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.common.bias import LinearBias
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.training.search import check_fit, fit_bias
from hf_posswap.training.search.profiles import BaseWatch
from tests.contract.others import ALL

WORDS, LENGTH, HEADS = 29, 16, 4
SIZE: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": HEADS, "num_hidden_layers": 2}
GPT2 = GPT2Config(
    n_embd=32,
    n_head=HEADS,
    n_layer=2,
    vocab_size=WORDS,
    n_positions=LENGTH,
    initializer_range=0.3,
    scale_attn_by_inverse_layer_idx=True,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS: dict[str, Any] = {
    "gpt2": (GPT2LMHeadModel, GPT2),
    "one key head": (
        GPTBigCodeForCausalLM,
        GPTBigCodeConfig(
            n_embd=32, n_head=HEADS, n_layer=2, vocab_size=WORDS, n_positions=LENGTH, initializer_range=0.3
        ),
    ),
    "opt": (
        OPTForCausalLM,
        OPTConfig(**SIZE, ffn_dim=48, vocab_size=WORDS, max_position_embeddings=LENGTH, init_std=0.3),
    ),
    "local layers": (
        GPTNeoForCausalLM,
        GPTNeoConfig(
            hidden_size=32,
            num_heads=HEADS,
            num_layers=2,
            attention_types=[[["local", "global"], 1]],
            window_size=6,
            vocab_size=WORDS,
            max_position_embeddings=LENGTH,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "a decoder of bart's": (
        BartForCausalLM,
        BartConfig(
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=HEADS,
            decoder_ffn_dim=48,
            vocab_size=WORDS,
            max_position_embeddings=LENGTH,
            init_std=0.3,
            is_decoder=True,
            is_encoder_decoder=False,
        ),
    ),
    "bert": (
        BertForMaskedLM,
        BertConfig(
            **SIZE, intermediate_size=48, vocab_size=WORDS, max_position_embeddings=LENGTH, initializer_range=0.3
        ),
    ),
    "roberta": (
        RobertaForMaskedLM,
        RobertaConfig(
            **SIZE, intermediate_size=48, vocab_size=WORDS, max_position_embeddings=LENGTH + 2, initializer_range=0.3
        ),
    ),
}
ROTATING: dict[str, Any] = {
    **SIZE,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**ROTATING, "num_key_value_heads": 2, "head_dim": 8}
THETA = {"rope_type": "default", "rope_theta": 50.0}
LLAMA = LlamaConfig(**GROUPED, rope_parameters=THETA, attention_bias=True)
MODELS |= {
    "llama, grouped heads": (LlamaForCausalLM, LLAMA),
    "gpt_neox, a quarter rotates": (GPTNeoXForCausalLM, GPTNeoXConfig(**ROTATING)),
    "mistral, windows": (MistralForCausalLM, MistralConfig(**GROUPED, rope_parameters=THETA, sliding_window=6)),
    "qwen3, norms": (Qwen3ForCausalLM, Qwen3Config(**GROUPED, rope_parameters=THETA)),
    "gemma3, local and global": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**GROUPED, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    ),
    "gptj, half rotates, inside attention": (
        GPTJForCausalLM,
        GPTJConfig(
            n_embd=32,
            n_head=HEADS,
            n_layer=2,
            rotary_dim=4,
            vocab_size=WORDS,
            n_positions=LENGTH,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "roformer": (RoFormerForMaskedLM, RoFormerConfig(**ROTATING)),
}
SKIPPING = "gpt2, whose last block also adds the first one's output"
MODELS[SKIPPING] = (GPT2LMHeadModel, GPT2Config(**GPT2.to_dict() | {"n_layer": 4}))
SCHEMES: dict[str, LinearBias] = {
    "alibi": Alibi(),
    "interpolated": Alibi(interpolation=2.0),
    "learned slopes": Alibi(learned=True),
    "t5": T5Bias(num_buckets=8, max_distance=12),
}
ENCODERS = ("bert", "roberta", "roformer")
TEXTS = [np.random.default_rng(seed).integers(5, WORDS, size=size) for seed, size in enumerate((LENGTH, 11, 16, 2, 1))]


def build(name: str) -> Any:
    torch.manual_seed(0)
    cls, config = MODELS[name]
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float64).eval()
    if name == SKIPPING:
        outputs: list[Tensor] = []
        first, last = model.transformer.h[0], model.transformer.h[3]
        first.register_forward_hook(lambda module, args, output: outputs.append(output))
        last.register_forward_pre_hook(lambda module, args: (args[0] + outputs.pop(), *args[1:]))
    return model


def state(model: Any) -> dict[str, Tensor]:
    return {name: held.clone() for name, held in model.state_dict().items()}


@torch.no_grad()
def attention(model: Any, text: np.ndarray, layer: int) -> np.ndarray:
    """Return the logarithm of a layer's attention weights, [H, L, L]: scores, but for a number for each query."""
    out = model(input_ids=torch.from_numpy(text)[None], output_attentions=True)
    return out.attentions[layer][0].log().numpy()


def by_distance(differences: list[np.ndarray], distances: np.ndarray) -> np.ndarray:
    """Return the function of distance [N] nearest to what a head's scores differ by, each query's own constant free."""
    rows, values = [], []
    queries = sum(len(one) for one in differences)
    done = 0
    for one in differences:
        for i, j in np.argwhere(np.isfinite(one)):
            own = np.zeros(queries)
            own[done + i] = 1.0
            rows.append([*(distances == i - j), *own])
            values.append(one[i, j])
        done += len(one)
    return np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0][: len(distances)]


def least_squares(wanted: np.ndarray, paid: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Return the weights [F] of `features` [F, N] nearest to `wanted` [N], by the attention `paid` to each distance."""
    weights = 0.95 * paid / paid.sum() + 0.05 / len(paid)
    free = np.concatenate([features, np.ones((1, len(wanted)))])
    root = np.sqrt(weights)
    return np.linalg.lstsq((free * root).T, wanted * root, rcond=None)[0][:-1]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_nearest_where_attention_goes_layer_by_layer(name: str, scheme: LinearBias) -> None:
    """Scores are read off stock eager attention, whose softmax is undone; those without positions off a swapped one."""
    model = build(name)
    fitted: Any = fit_bias(model, scheme, TEXTS)
    geometry = hf_posswap.plan_swap(model, scheme).sites.geometry
    swapped = patch_model(build(name), fitted)
    distances = np.arange(1 - LENGTH if name in ENCODERS else 0, LENGTH)
    features = scheme.features(torch.from_numpy(distances), geometry).numpy()
    layers = range(4 if name == SKIPPING else 2)
    for layer in layers:
        own = fitted.of_layer(layer).mechanism(geometry)
        differences, paid = [], np.zeros((HEADS, len(distances)))
        for text in TEXTS:
            at = torch.arange(len(text))[None]
            bias = own.bias(at, at)[0].detach().numpy()
            with np.errstate(invalid="ignore"):
                seen = attention(model, text, layer)
                differences.append(seen - (attention(swapped, text, layer) - bias))
            for i, j in np.ndindex(len(text), len(text)):
                paid[:, distances == i - j] += np.exp(seen[:, i, j])[:, None]
        for head in range(HEADS):
            wanted = by_distance([less[head] for less in differences], distances)
            near = paid[head] > 0  # a softmax over seen keys is never 0
            expected = least_squares(wanted[near], paid[head][near], features[:, near])
            if isinstance(scheme, T5Bias):
                found = np.array(fitted.of_layer(layer).start)[:, head]
                shown = features[:, near].any(axis=1)
                away = (found - expected)[shown]
                assert np.ptp(away) < 1e-4 * np.ptp(expected), "but for a number for all keys"
            else:
                found = np.array(fitted.of_layer(layer).slopes)[head]
                assert found == pytest.approx(max(0.0, expected[0]), rel=1e-5, abs=1e-9)
    if isinstance(scheme, Alibi):
        assert any(slope > 0 for layer in layers for slope in fitted.of_layer(layer).slopes)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama, grouped heads", SKIPPING])
def test_each_block_reads_a_text_once_with_positions_and_once_without(name: str) -> None:
    model = build(name)
    blocks = locate(model).main.attention
    paths = [re.sub(r"(\.\d+)\..*", r"\1", path) for path in blocks]  # model.layers.1.self_attn
    counts = dict.fromkeys(paths, 0)
    for path in paths:
        own = model.get_submodule(path)
        mlp = next(module for child, module in own.named_children() if child in ("mlp", "intermediate"))

        def count(module: Any, args: tuple[Tensor, ...], path: str = path) -> None:
            counts[path] += args[0].shape[1] > 8  # not the few tokens that show whether blocks may be skipped

        mlp.register_forward_pre_hook(count)
        own.forward = own.forward  # as accelerate's hooks do
    held = [model.get_submodule(path).forward for path in paths]
    fit_bias(model, "alibi", TEXTS)
    texts = sum(len(text) > 8 for text in TEXTS)
    without = [3, 2, 1, 0] if name == SKIPPING else [1] * (len(paths) - 1) + [0]  # the last layer ends at its attention
    assert list(counts.values()) == [(1 + times) * texts for times in without]
    assert [vars(model.get_submodule(path))["forward"] for path in paths] == held


@pytest.mark.parametrize("reach", [(0, 299), (0, 20), (-299, 299), (-150, 7)])
def test_long_texts_are_summed_over_all_their_pairs(reach: tuple[int, int]) -> None:
    """Attention and centred scores by distance, in a text of several blocks of queries, pair by pair."""
    length, heads, random = 300, 2, np.random.default_rng(0)
    geometry = Geometry(8, heads, 1, 4, 1, 512, causal=reach[0] == 0)
    watch = BaseWatch(geometry, length + 5)
    watch.reach = reach
    query, key = random.normal(size=(heads, length, 4)), random.normal(size=(1, length, 4))
    watch.look(torch.from_numpy(query), torch.from_numpy(key), 0.5)
    scores = 0.5 * query @ key[0].T
    apart = np.arange(length)[:, None] - np.arange(length)
    seen = (apart >= reach[0]) & (apart <= reach[1])
    paid = np.where(seen, np.exp(scores), 0.0)
    paid /= paid.sum(axis=-1, keepdims=True)
    centred = scores - np.where(seen, scores, 0.0).sum(axis=-1, keepdims=True) / seen.sum(axis=-1, keepdims=True)
    for index, distance in enumerate(watch.distances.tolist()):
        pairs = seen & (apart == distance)
        np.testing.assert_allclose(watch.attention[:, index], paid[:, pairs].sum(axis=1), atol=1e-12)
        np.testing.assert_allclose(watch.profile[:, index], centred[:, pairs].sum(axis=1), atol=1e-10)


def test_scores_that_are_not_finite_are_refused() -> None:
    model = build("gpt2")
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = torch.inf
    refused(model, "^fit_bias: attention scores of layer 1 are not finite", NumericError)


def test_layers_that_see_chunks_are_refused() -> None:
    model = build("gpt2")
    own = model.transformer.h[1].attn.forward
    chunk = torch.arange(LENGTH) // 5

    def within_chunks(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        at = chunk[: hidden_states.shape[1]]
        seen = (at[:, None] == at).tril()[None, None]
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
        return own(hidden_states, *args, **kwargs | {"attention_mask": mask})

    model.transformer.h[1].attn.forward = within_chunks
    refused(model, "in which a query sees all keys up to a distance", UnsupportedSwapError)


def known(scores: list[list[Any]]) -> Any:
    """Return a GPT-2 whose head h of layer l has the scores that scores[l][h] says.

    ("slope", m) is m j, which is -m (i - j) but for a number for each query; ("wave", a) is a cos(i - j). The table has
    for each position p the columns (p, -p, r, -r, cos p, -cos p, sin p, -sin p, 0, ...), r such that all rows are of
    one length, which LayerNorm divides by. Nothing else in the model looks at anything.
    """
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel._from_config(GPT2, dtype=torch.float64).eval()
    place = torch.arange(LENGTH, dtype=torch.float64)
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.zero_()
        rest = (LENGTH**2 - place**2).sqrt()
        for column, held in enumerate((place, rest, torch.cos(place), torch.sin(place))):
            model.transformer.wpe.weight[:, 2 * column] = held
            model.transformer.wpe.weight[:, 2 * column + 1] = -held
        size = model.transformer.wpe.weight[0].square().mean().sqrt()  # what LayerNorm divides by
        for layer, (block, heads) in enumerate(zip(model.transformer.h, scores, strict=True)):
            for part in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_proj):
                part.weight.zero_()
                part.bias.zero_()
            width = 32 // HEADS
            weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
            for head, (kind, strength) in enumerate(heads):
                q, k = head * width, 32 + head * width
                unscaled = strength * width**0.5 * (layer + 1)
                if kind == "slope":
                    bias[q] = unscaled
                    weight[0, k] = size
                else:
                    for part in (0, 1):  # cos i cos j + sin i sin j
                        weight[4 + 2 * part, q + part] = size * unscaled
                        weight[4 + 2 * part, k + part] = size
    return model


def test_slopes_that_a_table_gives_are_found_again() -> None:
    slopes = [[0.5, 0.03, 0.0, 1.25], [0.002, 0.7, -0.3, 0.125]]
    model = known([[("slope", slope) for slope in layer] for layer in slopes])
    fitted: Any = fit_bias(model, "alibi", TEXTS)
    found = torch.tensor([fitted.of_layer(layer).slopes for layer in range(2)], dtype=torch.float64)
    expected = torch.tensor(slopes).double().clamp(min=0)  # a head that looks far away gets no penalty
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


def test_a_power_of_1_is_found_where_a_table_gives_slopes_and_training_may_change_it(tmp_path: Path) -> None:
    slopes = [[0.5, 0.03, 0.25, 1.25], [0.002, 0.7, -0.3, 0.125]]
    model = known([[("slope", slope) for slope in layer] for layer in slopes])
    fitted: Any = fit_bias(model, "kerple:variant=power", TEXTS)
    for layer, expected in enumerate(slopes):
        found = fitted.of_layer(layer)
        for r1, r2, slope in zip(found.r1, found.r2, expected, strict=True):
            if slope > 0:
                assert (r1, r2) == pytest.approx((slope, 1.0), rel=2e-2)
            else:
                assert r1 * LENGTH**r2 < 0.01, "a head that looks far away gets next to no penalty"
    with torch.no_grad():
        ids = torch.from_numpy(TEXTS[0])[None]
        before = model(input_ids=ids, output_attentions=False).logits
        after = patch_model(model, fitted)(input_ids=ids).logits
    torch.testing.assert_close(after, before, rtol=0, atol=1e-2)
    assert {name for name, _ in model.named_parameters() if "raw_r" in name} == {
        f"transformer.posswap.parts.{layer}.raw_r{number}" for layer in range(2) for number in (1, 2)
    }


def test_any_profile_that_a_table_gives_is_found_again_in_buckets_of_one_distance() -> None:
    sizes = [[1.0, 0.5, 2.0, 0.0], [0.1, 3.0, 0.25, 1.5]]
    model = known([[("wave", size) for size in layer] for layer in sizes])
    fitted: Any = fit_bias(model, T5Bias(num_buckets=2 * LENGTH, max_distance=64), TEXTS)
    wave = torch.cos(torch.arange(LENGTH).double())
    for layer in range(2):
        found = torch.tensor(fitted.of_layer(layer).start, dtype=torch.float64)  # [32, H]
        expected = (wave - wave.mean())[:, None] * torch.tensor(sizes[layer])
        torch.testing.assert_close(found[:LENGTH], expected, rtol=2e-5, atol=1e-5)
        assert torch.equal(found[LENGTH:], found[LENGTH - 1].expand(LENGTH, -1)), "distances that no text has"


def constant(heads: int, groups: int) -> Any:
    """Return a Llama whose queries and keys are the same vectors for every token: rotated, scores go by distance."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM._from_config(LLAMA, attn_implementation="eager", dtype=torch.float64).eval()
    assert (LLAMA.num_attention_heads, LLAMA.num_key_value_heads) == (heads, groups)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.zero_()
                projection.bias.normal_(std=2.0)
    return model


def test_a_rotation_that_goes_by_distance_is_found_again_in_buckets_of_one_distance() -> None:
    """The swapped model then has the base's logits, at every position that the fit has seen."""
    model = constant(HEADS, 2)
    ids = torch.randint(3, WORDS, (3, LENGTH))
    with torch.no_grad():
        before = model(input_ids=ids).logits
    fitted: Any = fit_bias(model, T5Bias(num_buckets=2 * LENGTH, max_distance=64), TEXTS)
    geometry = hf_posswap.plan_swap(model, "t5").sites.geometry
    for layer, block in enumerate(model.model.layers):
        q = block.self_attn.q_proj.bias.detach().view(HEADS, 8)
        k = block.self_attn.k_proj.bias.detach().view(2, 8).repeat_interleave(2, dim=0)
        (q1, q2), (k1, k2) = q.chunk(2, dim=1), k.chunk(2, dim=1)
        angles = torch.arange(LENGTH)[:, None, None] * torch.tensor(geometry.frequencies).double()  # [N, 1, R/2]
        turned = (q1 * k1 + q2 * k2) * angles.cos() + (q1 * k2 - q2 * k1) * angles.sin()
        expected = turned.sum(dim=-1) / 8**0.5  # [N, H]
        found = torch.tensor(fitted.of_layer(layer).start, dtype=torch.float64)[:LENGTH]
        away = found - expected
        torch.testing.assert_close(away, away.mean(dim=0).expand_as(away), rtol=0, atol=2e-5)
    with torch.no_grad():
        without = patch_model(model, "nope")(input_ids=ids).logits
        after = patch_model(unpatch_model(model), fitted)(input_ids=ids).logits
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    assert (without - before).abs().max() > 0.1, "the rotation does something in this model"


def test_layers_without_rotation_stay_without_positions() -> None:
    model = tiny_model("smollm3", meta=False)
    still = swap_plan(patch_model(model, "alibi")).sites.main.nope_layers
    unpatch_model(model)
    fitted = fit_bias(model, "alibi", TEXTS)
    names = [fitted.of_layer(layer).name for layer in range(model.config.num_hidden_layers)]
    assert names == ["nope" if layer in still else "alibi" for layer in range(len(names))]
    assert {"nope", "alibi"} == set(names)
    verify_swap(patch_model(model, fitted))


def test_the_swapped_model_attends_as_the_table_had_it() -> None:
    model = known([[("slope", 0.1 * (head + 1)) for head in range(HEADS)]] * 2)
    model.set_attn_implementation("eager")
    text = TEXTS[0]
    before = [attention(model, text, layer) for layer in range(2)]
    patch_model(model, fit_bias(model, "alibi", TEXTS))
    for layer in range(2):
        after = attention(model, text, layer)
        np.testing.assert_allclose(np.exp(after), np.exp(before[layer]), atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama, grouped heads", "gemma3, local and global", "roformer"])
def test_the_fit_leaves_the_model_alone_and_the_swap_comes_off_again(name: str, scheme: LinearBias) -> None:
    model = build(name).train()
    before, cls = state(model), type(model)
    modes = [module.training for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    fitted = fit_bias(model, scheme, TEXTS)
    assert type(model) is cls
    assert not hasattr(model, "_posswap")
    assert modes == [module.training for module in model.modules()]
    assert trained == [parameter.requires_grad for parameter in model.parameters()]
    assert fit_bias(model, scheme, [torch.from_numpy(text) for text in TEXTS]) == fitted, "the same once more"
    verify_swap(patch_model(model, fitted))
    unpatch_model(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["alibi", "alibi:learned=true", "t5", "kerple", "kerple:variant=power"])
def test_what_was_fitted_is_saved_and_never_fitted_again(name: str, tmp_path: Path) -> None:
    model = build("gpt2").float()
    patch_model(model, fit_bias(model, SCHEMES.get(name, name), TEXTS), max_length=64)
    with torch.no_grad():
        for parameter in model.parameters():  # as training would
            parameter += 0.01 * torch.randn_like(parameter)
    hf_posswap.save(model, tmp_path)
    loaded = hf_posswap.load(tmp_path, attn_implementation="eager").eval()
    assert swap_plan(loaded).scheme == swap_plan(model).scheme
    assert json.loads((tmp_path / "config.json").read_text())["posswap"] == model.config.posswap
    ids = torch.randint(5, WORDS, (2, 64))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    verify_swap(loaded)
    with pytest.raises(UnsupportedSwapError, match="no stock class computes GPT2LMHeadModel with per_layer"):
        hf_posswap.to_native(loaded)


def test_a_checkpoint_that_says_nothing_of_learned_slopes_has_constant_ones(tmp_path: Path) -> None:
    """As those that were saved before slopes could be learned."""
    model = build("gpt2").float()
    patch_model(model, fit_bias(model, "alibi", TEXTS), max_length=64)
    hf_posswap.save(model, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for layer in config["posswap"]["scheme"]["layers"].values():
        assert layer.pop("learned") is False
    path.write_text(json.dumps(config))
    loaded = hf_posswap.load(tmp_path, attn_implementation="eager").eval()
    assert swap_plan(loaded).scheme == swap_plan(model).scheme
    ids = torch.randint(5, WORDS, (2, 64))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_one_scheme_of_the_fit_serves_all_layers_if_asked() -> None:
    model = build("gpt2")
    fitted: Any = fit_bias(model, "alibi", TEXTS)
    patch_model(model, fitted.of_layer(1))
    assert swap_plan(model).scheme == fitted.of_layer(1)


@pytest.mark.parametrize("scheme", ["rope", "fire", "nope", {0: "alibi", 1: "alibi"}])
def test_a_scheme_without_a_fit_is_refused(scheme: Any) -> None:
    with pytest.raises(SchemeError, match=r"^fit_bias: scheme must be alibi, kerple or t5, whose bias can be fitted"):
        fit_bias(build("gpt2"), scheme, TEXTS)


@pytest.mark.parametrize(
    ("scheme", "field"),
    [
        (Alibi(slopes=(0.5, 0.25, 0.1, 0.1)), "slopes of alibi"),
        (T5Bias(init_std=0.1), "init_std of t5"),
        (Kerple(r1=(0.5,) * 4, r2=(1.0,) * 4), "r1 of kerple"),
        (T5Bias(num_buckets=2, start=((0.0,) * 4,) * 2), "start of t5"),
    ],
)
def test_what_the_fit_finds_is_not_to_be_given(scheme: Any, field: str) -> None:
    with pytest.raises(SchemeError, match=f"^fit_bias: {field} is determined by the fit; leave it out.$"):
        fit_bias(build("gpt2"), scheme, TEXTS)


def refused(model: Any, says: str, error: type[Exception], tokens: Any = TEXTS) -> None:
    before = state(model)
    with pytest.raises(error, match=says):
        fit_bias(model, "alibi", tokens)
    after = model.state_dict()
    assert all(after[key].is_meta or torch.equal(before[key], after[key]) for key in before)


def test_models_that_cannot_be_fitted_are_refused() -> None:
    patched = patch_model(build("gpt2"), "alibi")
    with pytest.raises(AlreadyPatchedError):
        fit_bias(patched, "alibi", TEXTS)
    refused(tiny_model("llama"), "its weights are on meta: load it with its weights", UnsupportedModelError)
    both = BartModel(BartConfig(d_model=32, vocab_size=WORDS, encoder_layers=1, decoder_layers=1))
    refused(both, "fit_bias fits models of one stack, and BartModel is an encoder and a decoder", UnsupportedSwapError)
    with torch.device("meta"):
        empty = GPT2LMHeadModel(GPT2)
    refused(empty, "its weights are on meta: load it with its weights", UnsupportedModelError)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("albert", "AlbertForMaskedLM do not run exactly once per forward"),
        ("whisper", "WhisperForConditionalGeneration is an encoder and a decoder"),
        ("xglm", "XGLMForCausalLM has a table that is computed, not learned"),
        ("mpnet", "MPNetForMaskedLM has a table and other positions in addition to it"),
        ("deberta", "DebertaForMaskedLM has a table and other positions in addition to it"),
    ],
)
def test_models_whose_scores_say_something_else_are_refused(name: str, says: str) -> None:
    changes = {"relative_attention": True} if name == "deberta" else {}
    refused(ALL[name].build(**changes), says, UnsupportedSwapError)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gemma2", r"Gemma2ForCausalLM changes its scores after that \(attn_logit_softcapping\)"),
        ("gpt_oss", r"GptOssForCausalLM changes its scores after that \(sinks\)"),
        ("bloom", "BloomForCausalLM has alibi, a bias of its own. What works: GPT-2, .* Llama"),
        ("doge", "the mask of one layer also changes the scores of keys that it shows"),
        ("llama4_text", "the mask of one layer is different"),
        ("diffllama", "DiffLlamaForCausalLM do not run exactly once per forward"),
    ],
)
def test_rotating_models_whose_scores_are_no_sum_are_refused(name: str, says: str) -> None:
    refused(tiny_model(name, meta=False), says, UnsupportedSwapError)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([], r"tokens must be rows of token ids"),
        ([[1, 2], [3.5, 4.0]], r"tokens\[1\] must be a row of whole token ids"),
        ([list(range(5, 22)), [1]], r"tokens\[0\] has 17 tokens, and the model's positions end at 16; cut it"),
        ([[5], [6]], "only rows of one token, and a fit compares two keys of a query: give longer rows"),
        ([[5, 99]], "99"),
    ],
)
def test_tokens_that_say_nothing_are_refused(tokens: Any, says: str) -> None:
    refused(build("gpt2"), says, DataError, tokens)


def test_padding_that_positions_skip_is_refused() -> None:
    refused(build("roberta"), r"tokens\[1\] holds padding \(id 1\), which positions skip", DataError, [[5, 6], [7, 1]])


def test_a_fitted_bias_is_near_the_table_where_the_stock_one_is_not() -> None:
    """On a model whose heads look at their neighbours: what the fit is for."""
    model = known([[("slope", 0.9)] * HEADS] * 2)
    model.set_attn_implementation("eager")
    text = TEXTS[0]
    before = np.exp(attention(model, text, 0))
    away = {}
    for name, scheme in (("stock", Alibi()), ("fitted", fit_bias(model, "alibi", TEXTS))):
        patch_model(model, scheme)
        away[name] = float(np.abs(np.exp(attention(model, text, 0)) - before).max())
        unpatch_model(model)
    assert away["fitted"] < 1e-4 < 0.1 < away["stock"]


@pytest.mark.parametrize(("name", "says"), [("llama", None), ("gemma2", "softcapping"), ("gpt_oss", "sinks")])
def test_a_model_without_weights_is_checked_before_it_is_loaded(name: str, says: str | None) -> None:
    model = tiny_model(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    if says is None:
        check_fit(model, Alibi())
        check_fit(model, T5Bias())
        return
    with pytest.raises(UnsupportedSwapError, match=says):
        check_fit(model, Alibi())


def test_a_fit_is_a_scheme_for_each_layer() -> None:
    fitted = fit_bias(build("gpt2"), "t5", TEXTS)
    assert type(fitted) is PerLayer
    assert fitted.default is None
    assert PerLayer(**{field.name: getattr(fitted, field.name) for field in dataclasses.fields(fitted)}) == fitted
    assert "start=32x4 numbers" in str(fitted)
    assert len(str(fitted)) < 300
