"""Swaps in models whose attention lacks the interface, or has positions of its own inside."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posswap
from hf_posswap import SwapPlan, patch_model, plan_swap, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.testing.contract.models import copied
from hf_posswap.testing.tiny import tiny_model
from tests.families.interface_models import words
from tests.stock import RELEASE, cache_in, with_cache

LENGTH = 32
"""Original length of the tiny models that have one."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"attention_types": [[["global", "local"], 1]], "window_size": 6, "num_layers": 2},
    ),
    "openai-gpt": ("OpenAIGPTLMHeadModel", {"n_layer": 2}),
    "xglm": ("XGLMForCausalLM", {"num_layers": 2}),
    "gptj": ("GPTJForCausalLM", {"n_layer": 2}),
    "codegen": ("CodeGenForCausalLM", {"n_layer": 2}),
    "bloom": ("BloomForCausalLM", {"n_layer": 2}),
    "mpt": ("MptForCausalLM", {"max_seq_len": LENGTH, "n_layers": 2}),
    "falcon": ("FalconForCausalLM", {"num_hidden_layers": 2}),
    "falcon (alibi)": ("FalconForCausalLM", {"alibi": True, "num_hidden_layers": 2}),
    "mpnet": ("MPNetForMaskedLM", {"num_hidden_layers": 2}),
    "roformer": ("RoFormerForMaskedLM", {"num_hidden_layers": 2}),
    "roformer (is_decoder)": ("RoFormerForCausalLM", {"is_decoder": True, "num_hidden_layers": 2}),
    "t5": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0, "num_layers": 2, "num_decoder_layers": 2}),
    "umt5": ("UMT5ForConditionalGeneration", {"decoder_start_token_id": 0, "num_layers": 2, "num_decoder_layers": 2}),
}
if RELEASE < (5, 18):
    del KINDS["roformer (is_decoder)"]
ENCODERS = {"mpnet", "roformer"}
TABLES = {"gpt_neo", "openai-gpt", "mpnet"}
SCHEMES = ("rope", "alibi", "nope", "t5", "sinusoidal", "yarn", "fire", "learned")
SELDOM = ("yarn", "fire", "learned")
"""Schemes that run with slow tests only."""
NOISE = 2e-4
"""The largest difference that float32 rounding makes of logits up to 20."""
CACHELESS = {"openai-gpt", *ENCODERS}


def build(kind: str, **changes: Any) -> Any:
    name, values = KINDS[kind]
    return tiny_model(name, meta=False, **values | changes)


def supported(kind: str, scheme: str) -> bool:
    if scheme in ("sinusoidal", "learned"):
        return kind in TABLES
    return not (scheme in ("nope", "fire") and kind in {*ENCODERS, "t5", "umt5"})


PAIRS = [(kind, scheme) for kind in KINDS for scheme in SCHEMES if supported(kind, scheme)]
every_pair = pytest.mark.parametrize(
    ("kind", "scheme"),
    [pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] in SELDOM else ()) for pair in PAIRS],
)
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def options(scheme: str, model: Any) -> dict[str, Any]:
    """Return what a swap of `model` to twice its length is called with."""
    length = hf_posswap.describe_positions(model).geometry.original_length
    return {"max_length": 2 * length} | ({"init_std": 1.0} if scheme == "t5" else {})


def swap(model: Any, scheme: str) -> SwapPlan:
    return swap_plan(patch_model(model, scheme, **options(scheme, model)))


def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    if model.config.is_encoder_decoder:
        kwargs.setdefault("decoder_input_ids", ids)
        if "attention_mask" in kwargs:
            kwargs.setdefault("decoder_attention_mask", kwargs["attention_mask"])
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def stepwise(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of chunks of 7, 4, 1, 1, ... tokens, each after the cache of those before."""
    found, cache, begin = [], None, 0
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    first = {"input_ids": ids} if model.config.is_encoder_decoder else {}
    while begin < ids.shape[1]:
        chunk = ids[:, begin : begin + {0: 7, 7: 4}.get(begin, 1)]
        with torch.no_grad():
            out = model(**first | {name: chunk}, **with_cache(model, cache), use_cache=True)
        found, cache, begin = [*found, out.logits], cache_in(out), begin + chunk.shape[1]
    return torch.cat(found, dim=1)


@every_pair
def test_the_swap_is_verified_and_comes_back(kind: str, scheme: str) -> None:
    model, ids = build(kind), words(2, 12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parts = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    expected, config = logits(model, ids), model.config.to_dict()
    plan = swap(model, scheme)
    assert str(plan)
    verify_swap(model)
    if plan.adaptation.startswith("none") or scheme == "learned" or (kind, scheme) == ("falcon", "rope"):
        assert gap(logits(model, ids), expected) < 1e-5
    else:
        assert gap(logits(model, ids), expected) > 1e-2
    unpatch_model(model)
    now = model.state_dict()
    assert list(now) == list(before)
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()] == parts
    assert model.config.to_dict() == config
    assert torch.equal(logits(model, ids), expected)


@every_pair
def test_it_is_loaded_as_it_was_saved_and_stock_classes_do_the_same_or_refuse(
    kind: str, scheme: str, tmp_path: Path
) -> None:
    model, ids = build(kind), words(2, LENGTH + 8)
    stock = type(model)
    plan = swap(model, scheme)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    loaded = hf_posswap.load(tmp_path)
    assert torch.equal(logits(loaded, ids), expected)
    assert loaded.config.dtype == torch.float32
    verify_swap(loaded)
    if plan.route == "native":
        assert gap(logits(stock.from_pretrained(tmp_path), ids), expected) < 1e-5
    else:
        with pytest.raises((RuntimeError, KeyError, AttributeError, ValueError), match="posswap|mismatched"):
            stock.from_pretrained(tmp_path)


@every_pair
def test_cached_and_whole_forward_agree(kind: str, scheme: str) -> None:
    if kind in CACHELESS:
        pytest.skip("it has no cache")
    model, ids = build(kind), words(2, LENGTH - 2 if scheme == "yarn" else LENGTH + 6)
    swap(model, scheme)
    assert gap(stepwise(model, ids), logits(model, ids)) < NOISE


@every_pair
def test_left_padding_changes_nothing(kind: str, scheme: str) -> None:
    model, ids = build(kind), words(1, 12)
    swap(model, scheme)
    padded = torch.cat((torch.ones(1, 5, dtype=torch.long), ids), dim=1)
    mask = (torch.arange(17) >= 5).long()[None]
    given: dict[str, Any] = {"attention_mask": mask}
    tabled = scheme in ("learned", "sinusoidal") and kind != "mpnet"
    if tabled or (scheme == "fire" and "position_ids" in inspect.signature(model.base_model.forward).parameters):
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    assert gap(logits(model, padded, **given)[:, 5:], logits(model, ids)) < NOISE


@every_kind
def test_sdpa_does_what_eager_code_does(kind: str) -> None:
    old_t5 = RELEASE < (5, 18)
    if kind == "mpt" or (kind in ("t5", "umt5") and old_t5):  # whose cross-attention lacks the interface
        pytest.skip("the masks of the model are made for eager code")
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[0, :3] = 0
    for scheme in ("rope", "alibi"):
        found = []
        for name in ("eager", "sdpa"):
            model = build(kind)
            swap(model, scheme)
            for part in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
                part._attn_implementation = name
            found.append(logits(model, words(2, 14), attention_mask=mask)[mask.bool()])
        assert gap(*found) < NOISE


@every_kind
def test_lengths_beyond_the_original_run(kind: str) -> None:
    model, ids = build(kind), words(1, 3 * LENGTH)
    swap(model, "alibi")
    found = logits(model, ids)
    assert torch.isfinite(found).all()
    if kind in ENCODERS or model.config.is_encoder_decoder:
        return
    assert gap(found[:, :LENGTH], logits(model, ids[:, :LENGTH])) < NOISE  # causal


@every_kind
@pytest.mark.parametrize("way", ["deepcopy", pytest.param("torch.save", marks=pytest.mark.slow)])
def test_copies_are_whole_and_come_back_alone(kind: str, way: str) -> None:
    model, ids = build(kind), words(2, 12)
    native = logits(model, ids)
    swap(model, "rope")
    expected = logits(model, ids)
    twin = copied(model, way)
    assert torch.equal(logits(twin, ids), expected)
    assert torch.equal(logits(unpatch_model(twin), ids), native)
    assert torch.equal(logits(model, ids), expected)


@every_kind
def test_gradient_checkpointing_gives_the_same_gradients(kind: str) -> None:
    model, ids = build(kind), words(2, 12)
    if not model.supports_gradient_checkpointing:
        pytest.skip("the model has no gradient checkpointing")
    swap(model, "rope")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("hidden_dropout", "attn_dropout_p", "dropout_rate", "dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    found = []
    for again in (False, True):
        if again:
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        model.zero_grad()
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed = found
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-3, atol=5e-5)


def test_left_padding_that_a_second_run_would_forget_is_refused() -> None:
    model, ids = build("bloom"), words(2, 12)
    swap(model, "rope")
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    mask = torch.ones_like(ids)
    model.train()(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    mask[0, :3] = 0
    with pytest.raises(UnsupportedSwapError, match="What works: no position ids and padding on the right, or no check"):
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False)


@every_kind
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_see_the_swapped_attention(kind: str) -> None:
    peft = pytest.importorskip("peft")
    model, ids = build(kind), words(2, 12)
    swap(model, "rope")
    expected = logits(model, ids)
    names = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    query = sorted(names & {"q_proj", "query_key_value", "qkv_proj", "Wqkv", "query", "q"}) or ["c_attn"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=query, init_lora_weights=True))
    assert gap(logits(adapted, ids), expected) == 0
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    tuned = logits(adapted, ids)
    assert gap(tuned, expected) > 1e-3
    merged = adapted.merge_and_unload()
    assert gap(logits(merged, ids), tuned) < 1e-4
    verify_swap(merged)


def test_another_class_of_attention_is_refused() -> None:
    model = build("gpt_neo")
    attention = model.transformer.h[1].attn.attention
    attention.__class__ = type("Mine", (type(attention),), {})
    with pytest.raises(
        UnsupportedSwapError, match=r"h\.1\.attn\.attention: its class is Mine, .* What works: the same"
    ):
        plan_swap(model, "rope")
    assert plan_swap(model, "sinusoidal").route == "native"


@pytest.mark.skipif(
    RELEASE >= (5, 18),
    reason="in this release of transformers they do not see their future",
)
def test_a_roformer_decoder_that_sees_its_future_is_refused() -> None:
    with pytest.raises(UnsupportedSwapError, match="lets such decoders see future tokens"):
        plan_swap(tiny_model("RoFormerForCausalLM", is_decoder=True), "rope")


def test_slow_but_exact_bloom_is_refused() -> None:
    model = build("bloom", pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(UnsupportedSwapError, match="slow_but_exact with pretraining_tp > 1"):
        plan_swap(model, "rope")


def test_a_roformer_whose_sinusoids_were_changed_is_refused() -> None:
    model = build("roformer")
    with torch.no_grad():
        model.roformer.encoder.embed_positions.weight.mul_(2)
    with pytest.raises(UnsupportedSwapError, match="embed_positions holds other numbers than the sinusoids"):
        plan_swap(model, "rope")


@pytest.mark.parametrize("kind", ["bloom", "t5", *(["gptj"] if RELEASE < (5, 24) else [])])  # then it has a rotary
def test_native_positions_that_come_back_are_noticed(kind: str) -> None:
    model = build(kind)
    plan = swap(model, "rope")
    path = next(edit.path for edit in plan.edits if edit.before in ("rope", "alibi", "32 rows"))
    module = model.get_submodule(path)
    if kind == "t5":
        model.set_submodule(path, torch.nn.Embedding(32, module.width))
    else:
        module.native_positions = True
    with pytest.raises(hf_posswap.errors.SwapVerificationError, match="native positions"):
        verify_swap(model)


@pytest.mark.parametrize("name", ["RoFormerForCausalLM", "RemBertForCausalLM"])
def test_a_decoder_whose_cross_attention_is_of_the_same_class_is_swapped_in_its_self_attention_alone(name: str) -> None:
    native = tiny_model(name, meta=False, add_cross_attention=True)
    model = copy.deepcopy(native)
    if name == "RoFormerForCausalLM":
        patch_model(model, "rope", layout="interleaved", site="attention")
    else:  # no bias and no table
        patch_model(model, "alibi", slopes=[1e-12] * 4)
        native.base_model.embeddings.position_embeddings.weight.data.zero_()
    shown = torch.ones(2, 7, dtype=torch.long)
    shown[0, 4:] = 0
    encoder = torch.linspace(-1, 1, 2 * 7 * 64).view(2, 7, 64)
    given = {"input_ids": torch.randint(5, 90, (2, 20)), "encoder_attention_mask": shown}
    with torch.no_grad():
        expected = native(**given, encoder_hidden_states=encoder).logits
        actual = model(**given, encoder_hidden_states=encoder).logits
        hidden = torch.where(shown.bool()[..., None], encoder, 9.0)
        assert torch.equal(model(**given, encoder_hidden_states=hidden).logits, actual)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
