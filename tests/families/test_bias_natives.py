"""Position mechanisms that are native inside attention: taken away and put back, they are what they were.

The oracles are transformers itself: native models whose own bias is written to be another one.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_posswap
from hf_posswap import patch_model, plan_swap, swap_plan, verify_swap
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.patching.sites.attention.native import AttendThroughInterface
from hf_posswap.schemes import Alibi, Kerple, Learned, PerLayer, Rope
from hf_posswap.schemes.alibi import slopes
from hf_posswap.testing.tiny import tiny_config, tiny_model
from tests.families.interface_models import words
from tests.stock import RELEASE

IDS = words(2, 14)
MASK = torch.ones(2, 14, dtype=torch.long)
MASK[0, :4] = 0
NOISE = 2e-5


def build(kind: str, **changes: Any) -> Any:
    if kind == "T5EncoderModel":
        torch.manual_seed(0)
        return transformers.T5EncoderModel(tiny_config(transformers.T5Config, **changes)).eval()
    return tiny_model(kind, meta=False, **changes)


def logits(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    if model.config.is_encoder_decoder:
        kwargs.setdefault("decoder_input_ids", ids)
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def same(a: Tensor, b: Tensor, noise: float = NOISE) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=noise)


NATIVE: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "gptj": ("GPTJForCausalLM", {}, "rope", {}),
    "codegen": ("CodeGenForCausalLM", {}, "rope", {}),
    "roformer": ("RoFormerForMaskedLM", {}, "rope", {}),
    "bloom": ("BloomForCausalLM", {}, "alibi", {}),
    "bloom (6 heads)": ("BloomForCausalLM", {"n_head": 6, "hidden_size": 48}, "alibi", {}),
    "mpt": ("MptForCausalLM", {}, "alibi", {}),
    "mpt (6 heads)": ("MptForCausalLM", {"n_heads": 6, "d_model": 48}, "alibi", {}),
    "falcon": ("FalconForCausalLM", {}, "rope", {"site": "attention"}),
    "falcon (groups)": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        "rope",
        {"site": "attention"},
    ),
    "t5": ("T5ForConditionalGeneration", {}, "t5", {}),
    "mt5": ("MT5ForConditionalGeneration", {}, "t5", {}),
    "t5 (other buckets)": (
        "T5ForConditionalGeneration",
        {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 20},
        "t5",
        {"num_buckets": 12, "max_distance": 20},
    ),
    "t5 (encoder)": ("T5EncoderModel", {}, "t5", {}),
    "switch": ("SwitchTransformersForConditionalGeneration", {}, "t5", {}),
    "longt5": ("LongT5ForConditionalGeneration", {}, "t5", {}),
}
SHARES_ITS_BIAS = RELEASE >= (5, 18)
if not SHARES_ITS_BIAS:
    del NATIVE["switch"]


@pytest.mark.parametrize("name", list(NATIVE))
def test_put_back_it_is_the_native_mechanism(name: str) -> None:
    kind, config, scheme, options = NATIVE[name]
    model = build(kind, **config)
    run = (lambda **given: model(input_ids=IDS, **given).last_hidden_state) if kind == "T5EncoderModel" else None
    outputs = run or (lambda **given: logits(model, **given))
    with torch.no_grad():
        whole, padded = outputs(), outputs(attention_mask=MASK)
        plan = swap_plan(patch_model(model, scheme, **options))
        assert plan.adaptation.startswith("none")
        same(outputs(), whole)
        same(outputs(attention_mask=MASK)[MASK.bool()], padded[MASK.bool()])


def slopes_of(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes of a power of two of heads, by the paper."""
    return tuple(2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads))


BIASES: dict[str, Any] = {
    "alibi": {"name": "alibi"},
    "alibi, slopes of the paper": {"name": "alibi", "slopes": slopes_of(4)},
    "alibi, other slopes": {"name": "alibi", "slopes": (0.5, 0.25, 0.2, 0.1)},
    "alibi, interpolated": {"name": "alibi", "interpolation": 2.0},
    "t5": {"name": "t5"},
    "t5, as alibi": {
        "name": "t5",
        "num_buckets": 4096,
        "max_distance": 8192,
        "start": tuple(tuple(-slope * bucket for slope in slopes_of(4)) for bucket in range(4096)),
    },
    "fire": {"name": "fire"},
    "kerple": {"name": "kerple"},
    "for each layer": PerLayer(layers={1: Alibi(slopes=slopes_of(4))}, default=Alibi()),
    "one layer of another": PerLayer(layers={1: Kerple()}, default=Alibi()),
}


@pytest.mark.parametrize("scheme", BIASES)
@pytest.mark.parametrize("name", ["bloom", "mpt", "t5"])
def test_a_bias_for_another_is_usable_untrained_where_it_begins_as_the_old_one(name: str, scheme: str) -> None:
    model = build(*NATIVE[name][:1], **NATIVE[name][1])
    with torch.no_grad():
        before = logits(model)
        plan = swap_plan(patch_model(model, BIASES[scheme]))
        away = (logits(model) - before).abs().max()
    assert plan_swap(build(*NATIVE[name][:1], **NATIVE[name][1]), BIASES[scheme]).adaptation == plan.adaptation
    if away < 1e-4:
        assert plan.adaptation.startswith("none"), scheme
    elif scheme == "alibi, interpolated" and name != "t5":
        assert plan.adaptation.startswith("optional")
    else:
        assert plan.adaptation.startswith("required: fine-tuning; until then expect a high loss"), scheme


@pytest.mark.parametrize("name", ["gptj", "codegen", "bloom", "mpt", "falcon", "t5"])
def test_put_back_it_decodes_as_the_native_model(name: str) -> None:
    kind, config, scheme, options = NATIVE[name]
    native, model = build(kind, **config), build(kind, **config)
    patch_model(model, scheme, **options)
    given: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    if native.config.is_encoder_decoder:
        given |= {"decoder_start_token_id": 0, "num_beams": 3}
    ids = IDS.masked_fill(MASK == 0, 1)
    assert torch.equal(model.generate(ids, **given), native.generate(ids, **given))


@pytest.mark.skipif(
    RELEASE >= (5, 18),
    reason="in this release of transformers the class itself attends through the interface",
)
@pytest.mark.parametrize("name", ["T5", "MT5", "UMT5", "LongT5"])
def test_the_t5_kinds_through_the_interface_are_what_they_were(name: str) -> None:
    model = build(f"{name}ForConditionalGeneration")
    whole, padded = logits(model), logits(model, attention_mask=MASK)
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "decoder_start_token_id": 0}
    generated = model.generate(IDS, **given)
    interface = getattr(importlib.import_module("hf_posswap.families.interfaces.t5"), f"{name}Interface")
    for stack in locate(model).stacks:
        for layer, path in enumerate(stack.attention):
            AttendThroughInterface(
                site="attention",
                path=path,
                before="",
                after="",
                module=interface.__module__,
                name=interface.__name__,
                layer=layer,
                native_positions=True,
            ).apply(model, {})
    same(logits(model), whole)
    same(logits(model, attention_mask=MASK), padded)
    assert torch.equal(model.generate(IDS, **given), generated)


@pytest.mark.skipif(SHARES_ITS_BIAS, reason="in this release of transformers all its layers have the bias")
def test_a_switch_whose_first_layer_alone_has_a_bias_is_refused() -> None:
    with pytest.raises(
        UnsupportedSwapError, match="this release of transformers gives its bias only to the first layer"
    ):
        plan_swap(build("SwitchTransformersForConditionalGeneration"), "rope")


def test_falcons_alibi_is_alibi_scaled_with_the_scores() -> None:
    model = build("FalconForCausalLM", alibi=True)
    model.set_attn_implementation("sdpa")  # eager code of transformers adds it twice
    whole, padded = logits(model), logits(model, attention_mask=MASK)
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    patch_model(model, "alibi", interpolation=head_dim**0.5)
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        same(logits(model), whole)
        same(logits(model, attention_mask=MASK)[MASK.bool()], padded[MASK.bool()])


def test_falcon_from_alibi_to_rope_is_the_rotary_falcon() -> None:
    model, rotary = build("FalconForCausalLM", alibi=True), build("FalconForCausalLM", alibi=False)
    rotary.load_state_dict(model.state_dict())
    assert (logits(model) - logits(rotary)).abs().max() > 0.1
    patch_model(model, "rope")
    same(logits(model), logits(rotary))
    same(logits(model, attention_mask=MASK)[MASK.bool()], logits(rotary, attention_mask=MASK)[MASK.bool()])


def test_falcon_from_rope_to_alibi_is_the_other_falcon() -> None:
    model, native = build("FalconForCausalLM", alibi=False), build("FalconForCausalLM", alibi=True)
    native.load_state_dict(model.state_dict())
    native.set_attn_implementation("sdpa")
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    patch_model(model, "alibi", interpolation=head_dim**0.5)
    same(logits(model), logits(native))


def test_bloom_without_positions_is_bloom_with_a_bias_of_zero() -> None:
    model, native = build("BloomForCausalLM"), build("BloomForCausalLM")
    patch_model(model, "nope")
    make = native.transformer.build_alibi_tensor
    native.transformer.build_alibi_tensor = lambda *args, **kwargs: torch.zeros_like(make(*args, **kwargs))
    same(logits(model, attention_mask=torch.ones_like(IDS)), logits(native, attention_mask=torch.ones_like(IDS)))


def test_bloom_with_slopes_of_its_own_is_bloom_with_that_bias() -> None:
    own = (0.3, 0.0, 1.5, 0.04)
    model, native = build("BloomForCausalLM"), build("BloomForCausalLM")
    plan = swap_plan(patch_model(model, Alibi(slopes=own)))
    assert plan.route == "plugin"  # no config of BLOOM's says slopes
    make = native.transformer.build_alibi_tensor
    given = torch.tensor(own).repeat(len(IDS))[:, None, None] * torch.arange(IDS.shape[1])  # [B H, 1, K]
    native.transformer.build_alibi_tensor = lambda *args, **kwargs: given.to(make(*args, **kwargs))
    same(logits(model, attention_mask=torch.ones_like(IDS)), logits(native, attention_mask=torch.ones_like(IDS)))
    verify_swap(model)


def test_mpt_without_positions_is_mpt_with_a_bias_of_zero() -> None:
    model, native = build("MptForCausalLM"), build("MptForCausalLM")
    patch_model(model, "nope")
    make = native.transformer.build_mpt_alibi_tensor
    native.transformer.build_mpt_alibi_tensor = lambda *args, **kwargs: torch.zeros_like(make(*args, **kwargs))
    same(logits(model), logits(native))


def write_alibi(table: Tensor, per_side: int, two_sided: bool) -> None:
    """Write ALiBi into a T5 table, exact for the distances that have a bucket of their own."""
    distance = torch.arange(per_side // 2, dtype=torch.float32)  # each has its own bucket
    rows = -distance[:, None] * torch.tensor(slopes(table.shape[1]))  # [distance, H]
    with torch.no_grad():
        table.zero_()
        table[: len(rows)] = rows
        if two_sided:
            table[per_side : per_side + len(rows)] = rows


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "UMT5ForConditionalGeneration"])
def test_alibi_in_a_t5_is_a_t5_whose_table_is_linear(kind: str) -> None:
    model, native = (build(kind, relative_attention_num_buckets=64) for _ in range(2))
    for name, parameter in native.named_parameters():
        if "relative_attention_bias" in name:
            encoder = name.startswith("encoder")
            write_alibi(parameter, per_side=32 if encoder else 64, two_sided=encoder)
    expected = logits(native)
    assert (expected - logits(model)).abs().max() > 0.01
    patch_model(model, "alibi")
    same(logits(model), expected)
    same(logits(model, attention_mask=MASK), logits(native, attention_mask=MASK))


def test_a_t5_decoder_without_positions_is_a_t5_whose_table_is_zero() -> None:
    model, native = build("T5ForConditionalGeneration"), build("T5ForConditionalGeneration")
    patch_model(model, {"decoder": "nope"})
    with torch.no_grad():
        native.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.zero_()
    assert (logits(native) - logits(build("T5ForConditionalGeneration"))).abs().max() > 0.01
    same(logits(model), logits(native))


def test_alibi_in_an_mpnet_is_an_mpnet_without_table_whose_bias_is_linear() -> None:
    model, native = build("MPNetForMaskedLM"), build("MPNetForMaskedLM")
    write_alibi(native.mpnet.encoder.relative_attention_bias.weight, per_side=16, two_sided=True)
    with torch.no_grad():
        native.mpnet.embeddings.position_embeddings.weight.zero_()
    ids = IDS[:, :8]  # further keys share buckets
    expected = logits(native, ids)
    assert (expected - logits(model, ids)).abs().max() > 0.1
    patch_model(model, "alibi")
    same(logits(model, ids), expected)


def test_an_mpnet_with_another_table_keeps_its_bias() -> None:
    model, native = build("MPNetForMaskedLM"), build("MPNetForMaskedLM")
    patch_model(model, "sinusoidal")
    with torch.no_grad():
        native.mpnet.embeddings.position_embeddings.weight.copy_(model.mpnet.embeddings.position_embeddings.weight)
    same(logits(model), logits(native))


def test_rope_in_a_gpt_neo_of_global_layers_is_a_gpt_neox() -> None:
    model = build("GPTNeoForCausalLM", attention_types=[[["global"], 2]], num_layers=2)
    patch_model(model, "rope")
    same(logits(model), logits(neox_of(model)))
    same(logits(model, attention_mask=MASK)[MASK.bool()], logits(neox_of(model), attention_mask=MASK)[MASK.bool()])


def neox_of(model: Any) -> Any:
    """Return the GPT-NeoX that computes what GPT-Neo with RoPE must: its queries are scaled up, as it scales scores."""
    own, old = model.config, model.state_dict()
    heads, width = own.num_heads, own.hidden_size
    config = transformers.GPTNeoXConfig(
        vocab_size=own.vocab_size,
        hidden_size=width,
        num_hidden_layers=own.num_layers,
        num_attention_heads=heads,
        intermediate_size=own.intermediate_size or 4 * width,
        hidden_act=own.activation_function,
        layer_norm_eps=own.layer_norm_epsilon,
        use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    )
    new = {
        "gpt_neox.embed_in.weight": old["transformer.wte.weight"],
        "embed_out.weight": old["lm_head.weight"],
        "lm_head.weight": old["lm_head.weight"],
    }
    new |= {f"gpt_neox.final_layer_norm.{k}": old[f"transformer.ln_f.{k}"] for k in ("weight", "bias")}
    parts = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.attention.out_proj": "attention.dense",
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
    }
    for i in range(own.num_layers):
        here, there = f"transformer.h.{i}", f"gpt_neox.layers.{i}"
        for part, name in parts.items():
            new |= {f"{there}.{name}.{k}": old[f"{here}.{part}.{k}"] for k in ("weight", "bias")}
        rows = [old[f"{here}.attn.attention.{p}_proj.weight"].view(heads, -1, width) for p in "qkv"]
        rows[0] = rows[0] * (width // heads) ** 0.5
        new[f"{there}.attention.query_key_value.weight"] = torch.stack(rows, dim=1).reshape(3 * width, width)
        new[f"{there}.attention.query_key_value.bias"] = torch.zeros(3 * width)
    native = transformers.GPTNeoXForCausalLM(config).eval()
    names = native.state_dict().keys()
    native.load_state_dict({name: tensor for name, tensor in new.items() if name in names})
    return native


@pytest.mark.parametrize(
    "kind", ["BloomForCausalLM", "GPTJForCausalLM", "T5ForConditionalGeneration", "MPNetForMaskedLM"]
)
def test_a_blend_with_what_is_inside_attention_is_refused(kind: str) -> None:
    with pytest.raises(
        UnsupportedSwapError, match="blend cannot combine with the native .* inside .* What works: rope without blend"
    ):
        plan_swap(build(kind), "blend", new="rope", weight=0.5)


def test_an_angle_that_differs_only_past_the_original_length_is_the_native_one_within() -> None:
    model = build("GPTJForCausalLM")
    patch_model(model, "dynamic", factor=2.0)
    found = hf_posswap.verify_swap(model).checks["unswapped model"]
    assert found.endswith("as they should be: an identity")


def test_a_table_and_rope_in_an_mpnet_leave_no_bias() -> None:
    model = build("MPNetForMaskedLM")
    plan = swap_plan(patch_model(model, Learned() + Rope()))
    hf_posswap.verify_swap(model)
    assert "mpnet.encoder.relative_attention_bias.weight" in plan.unused
    before = logits(model)
    model.mpnet.encoder.relative_attention_bias.weight.fill_(3.0)  # one lone number, read by nobody
    same(logits(model), before, 0.0)


def test_a_bias_of_each_layer_is_not_taken_for_one_of_all() -> None:
    plan = plan_swap(build("UMT5ForConditionalGeneration"), "t5")
    assert plan.adaptation.startswith("required")  # its own biases go, and the one of all layers begins at zero
    assert not [edit for edit in plan.edits if edit.after.startswith("the rows of")]


def test_what_a_model_has_natively_is_told() -> None:
    told = {
        name: str(hf_posswap.describe_positions(build(kind, **config)).native)
        for name, (kind, config, *_) in NATIVE.items()
    }
    assert told["bloom"] == "alibi"
    assert told["t5"].startswith("t5(num_buckets=32, max_distance=128, init_std=0.0, seed=0)")
    assert told["gptj"].startswith("rope(base=10000.0")
