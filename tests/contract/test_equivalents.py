"""Swapped models equal native models of other classes, which know nothing of this package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import hf_posswap
from hf_posswap import patch_model, swap_plan, unpatch_model
from hf_posswap.testing.contract.points.running import piecewise
from tests.contract import twins
from tests.contract.models import LENGTH, PADDING, build
from tests.contract.pairs import CHANGE, Pair, gap, logits, words
from tests.exact_angles import with_exact_angles
from tests.stock import with_cache

CLOSE = 1e-5
LONG = 3 * LENGTH
IDS = words(2, LONG)

DECODERS: dict[str, tuple[str, str, Callable[[Any], Any], dict[str, Any]]] = {
    "gpt2 + rope = gpt_neox": ("gpt2", "rope", twins.neox_of_gpt2, {"max_length": LONG}),
    "opt + rope = gpt_neox": ("opt", "rope", twins.neox_of_opt, {"max_length": LONG}),
    "llama + nope = smollm3": ("llama", "nope", twins.smollm3_of, {"max_length": LONG}),
    "llama + nope inside = smollm3": ("llama", "nope", twins.smollm3_of, {"max_length": LONG, "site": "attention"}),
}
ENCODERS = {
    "bert + rope = jina": ("bert", twins.jina_of, {}),
    "roberta + rope = jina": ("roberta", twins.jina_of, {}),
    "bert + interleaved rope = roformer": ("bert", twins.roformer_of, {"layout": "interleaved"}),
}


@pytest.fixture(params=list(DECODERS))
def decoder(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Return a swapped decoder and its native equivalent."""
    name, scheme, twin_of, options = DECODERS[request.param]
    model = build(name)
    twin = with_exact_angles(twin_of(model))
    patch_model(model, scheme, **options)
    return model, twin


@pytest.fixture(params=list(ENCODERS))
def encoder(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Return a swapped encoder and its native equivalent."""
    name, twin_of, options = ENCODERS[request.param]
    model = build(name)
    twin = with_exact_angles(twin_of(model))
    patch_model(model, "rope", max_length=LONG, **options)
    return model, twin


def left_padded() -> tuple[Tensor, Tensor, Tensor]:
    ids, mask = IDS[:, :24].clone(), torch.ones(2, 24, dtype=torch.long)
    ids[1, :7], mask[1, :7] = PADDING, 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def test_decoders_at_once(decoder: tuple[Any, Any]) -> None:
    model, twin = decoder
    assert gap(logits(model, IDS), logits(twin, IDS)) < CLOSE
    model.set_attn_implementation("eager")
    twin.set_attn_implementation("eager")
    assert gap(logits(model, IDS), logits(twin, IDS)) < CLOSE


def test_decoders_left_padded(decoder: tuple[Any, Any]) -> None:
    model, twin = decoder
    ids, mask, positions = left_padded()
    found = logits(model, ids, attention_mask=mask, position_ids=positions)
    expected = logits(twin, ids, attention_mask=mask, position_ids=positions)
    assert gap(found[mask.bool()], expected[mask.bool()]) < CLOSE


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decoders_step_by_step(decoder: tuple[Any, Any], kind: str) -> None:
    model, twin = decoder
    ids = IDS[:, :40]
    found, expected = (
        piecewise(
            each,
            ids,
            [20] + [1] * 20,
            DynamicCache(config=each.config) if kind == "dynamic" else StaticCache(each.config, max_cache_len=LONG),
        )
        for each in (model, twin)
    )
    assert gap(found, expected) < CLOSE


def test_decoders_after_reload(decoder: tuple[Any, Any], tmp_path: Path) -> None:
    model, twin = decoder
    hf_posswap.save(model, tmp_path / "saved")
    loaded = hf_posswap.load(tmp_path / "saved")
    assert gap(logits(loaded, IDS), logits(twin, IDS)) < CLOSE


@pytest.mark.parametrize("beams", [1, 4])
def test_decoders_generate_token_by_token(decoder: tuple[Any, Any], beams: int) -> None:
    model, twin = decoder
    ids, mask, _ = left_padded()
    kwargs: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "num_beams": beams}
    assert model.generate(ids, **kwargs).tolist() == twin.generate(ids, **kwargs).tolist()


def test_encoders_plain_and_padded(encoder: tuple[Any, Any]) -> None:
    model, twin = encoder
    assert gap(logits(model, IDS), logits(twin, IDS)) < CLOSE
    ids, mask, _ = left_padded()
    for padded, keep in ((ids, mask), (ids.flip(1), mask.flip(1))):
        found, expected = (logits(each, padded, attention_mask=keep) for each in (model, twin))
        assert gap(found[keep.bool()], expected[keep.bool()]) < CLOSE


@pytest.mark.parametrize("first", ["the adapter", "the swap"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_lora_on_gpt2_with_rope_equals_the_same_lora_on_gpt_neox(first: str) -> None:
    base = build("gpt2")
    twin = peft.get_peft_model(
        with_exact_angles(twins.neox_of_gpt2(base)), _lora("query_key_value", fan_in_fan_out=False)
    ).eval()
    if first == "the swap":
        patch_model(base, "rope", max_length=LONG)
    model = peft.get_peft_model(base, _lora("c_attn", fan_in_fan_out=True)).eval()
    if first == "the adapter":
        patch_model(model, "rope", max_length=LONG)
    plain = logits(twin, IDS)
    for layer in range(twins.LAYERS):
        here = model.base_model.model.transformer.h[layer].attn.c_attn
        there = twin.base_model.model.gpt_neox.layers[layer].attention.query_key_value
        with torch.no_grad():
            there.lora_A.default.weight.copy_(here.lora_A.default.weight)
            there.lora_B.default.weight.copy_(twins.by_head(here.lora_B.default.weight))
    assert gap(logits(twin, IDS), plain) > CHANGE, "the adapter does nothing"
    assert gap(logits(model, IDS), logits(twin, IDS)) < CLOSE
    assert gap(logits(model.merge_and_unload(), IDS), logits(twin, IDS)) < 5 * CLOSE


def _lora(target: str, *, fan_in_fan_out: bool) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False, fan_in_fan_out=fan_in_fan_out)


def test_gpt2_without_positions_equals_a_zero_table() -> None:
    model, native = build("gpt2"), build("gpt2")
    with torch.no_grad():
        native.transformer.wpe.weight.zero_()
    patch_model(model, "nope", max_length=LONG)
    short = IDS[:, :LENGTH]
    assert gap(logits(model, short), logits(native, short)) == 0


@pytest.mark.parametrize("name", ["t5", "umt5", "longt5"])
def test_a_t5_decoder_without_positions_is_a_stock_t5_with_a_table_of_zeros(name: str, tmp_path: Path) -> None:
    pair = Pair(name, "nope", stack="decoder")
    model, native = pair.native(), pair.native()
    before = pair.logits(model, IDS)
    plan = swap_plan(patch_model(model, {"decoder": "nope"}))
    assert plan.route == "native"
    with torch.no_grad():
        for path in plan.unused:
            native.get_parameter(path).zero_()
    expected = pair.logits(native, IDS)
    assert gap(expected, before) > CHANGE
    hf_posswap.save(model, tmp_path)
    stock, dressed = pair.tiny.stock.from_pretrained(tmp_path), hf_posswap.load(tmp_path)
    for each in (model, stock, dressed, hf_posswap.to_native(model)):
        assert gap(pair.logits(each, IDS), expected) == 0
    trained = {path for path, _ in dressed.named_parameters()}  # stock classes would train the zeros
    assert not trained & set(plan.unused)
    assert gap(pair.logits(unpatch_model(model), IDS), before) == 0


def test_nope_asked_for_inside_a_t5_decoder_is_the_same_by_the_plugin() -> None:
    pair = Pair("t5", "nope", stack="decoder")
    outside, inside = pair.native(), pair.native()
    patch_model(outside, {"decoder": "nope"})
    assert swap_plan(patch_model(inside, {"decoder": "nope"}, site="attention")).route == "plugin"
    assert gap(pair.logits(inside, IDS), pair.logits(outside, IDS)) < CLOSE


def alibi_mask(mask: Tensor, first_query: int) -> Tensor:
    """Return -m_h (i - j) of Press et al. with everything unseen at the lowest float, by loops: [B, H, Q, K]."""
    heads, (batch, length) = 4, mask.shape
    out = torch.full((batch, heads, length - first_query, length), torch.finfo(torch.float32).min)
    for head in range(heads):
        slope = 2.0 ** (-8.0 * (head + 1) / heads)
        for row in range(batch):
            for query in range(first_query, length):
                for key in range(query + 1):
                    if mask[row, key]:
                        out[row, head, query - first_query, key] = -slope * (query - key)
    return out


def test_gpt2_with_alibi_equals_a_brute_force_bias() -> None:
    model, native = build("gpt2"), build("gpt2", attn_implementation="eager")
    with torch.no_grad():
        native.transformer.wpe.weight.zero_()
    patch_model(model, "alibi", max_length=LONG)
    ids, mask, positions = left_padded()
    expected = logits(native, ids, attention_mask=alibi_mask(mask, 0))
    seen = mask.bool()
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        found = logits(model, ids, attention_mask=mask, position_ids=positions)
        assert gap(found[seen], expected[seen]) < CLOSE
        assert gap(logits(model, ids, attention_mask=mask)[seen], expected[seen]) < CLOSE
    cache, steps = DynamicCache(config=model.config), []
    for i in range(24):
        kept, at = mask[:, : i + 1], positions[:, i : i + 1]
        steps.append(logits(model, ids[:, i : i + 1], attention_mask=kept, position_ids=at, **with_cache(model, cache)))
    assert gap(torch.cat(steps, dim=1)[seen], expected[seen]) < CLOSE


def test_llama_with_alibi_equals_a_brute_force_bias() -> None:
    model, native = build("llama"), build("llama", attn_implementation="eager")
    native.model.rotary_emb.inv_freq.zero_()
    patch_model(model, "alibi", max_length=LONG)
    ids, mask, _ = left_padded()
    expected = logits(native, ids, attention_mask=alibi_mask(mask, 0))
    found = logits(model, ids, attention_mask=mask)
    assert gap(found[mask.bool()], expected[mask.bool()]) < CLOSE
