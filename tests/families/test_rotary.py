"""Every rotary class of transformers: a native swap equals a fresh model of the swapped config, bit by bit."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

from hf_posswap import load, patch_model, plan_swap, swap_plan, unpatch_model
from hf_posswap.errors import UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families import locate
from hf_posswap.families.locating import REFUSED
from hf_posswap.families.rope_config import inv_freq_names, parameters_of
from hf_posswap.schemes.dynamic import LongRope
from hf_posswap.testing.tiny import language_models, tiny_model
from tests.stock import UNBUILT, with_cache

SHARDS = 12
SWAPS: dict[str, dict[str, Any]] = {
    "rope": {"base": 5000.0},
    "linear": {"factor": 2.0},
    "ntk": {"factor": 2.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 2.0},
    "nope": {},
}
NEVER_NATIVE = {
    # its rotary module reads keys of rope type "longrope" under every type but the default
    "PhimoeForCausalLM": {"linear", "yarn", "llama3", "nope"},
    # it knows positions without its rotation too, so the swap is refused
    "DeepseekV32ForCausalLM": {"nope"},
    "DeepseekV4ForCausalLM": {"nope"},
    "GlmMoeDsaForCausalLM": {"nope"},
}
"""Swaps that no stock config of a class says. NoPE is apart: stock says it where a whole head may be rotated."""
MAY_BE_PLUGIN = {"BambaForCausalLM", "DbrxForCausalLM"}
"""In some transformers their config class, or rotary module, is odd about rope types: stock cannot say it then."""
NEEDS_AUDIO = {"VoxtralRealtimeForConditionalGeneration"}
KINDS = (
    "DeepseekV3ForCausalLM",  # latent attention, interleaved
    "Gemma3ForCausalLM",  # frequencies for each type of layers
    "Gemma3ForConditionalGeneration",  # the text tower of a model of several modalities
    "GlmForCausalLM",  # interleaved, partial
    "GPTNeoXForCausalLM",  # a width that attention keeps
    "Llama4ForCausalLM",  # complex numbers, layers without rotation
    "ModernBertForMaskedLM",  # an encoder with two types of layers
    "T5GemmaForConditionalGeneration",  # two stacks
)
"""One class of each kind, run every day."""


def is_rotary(name: str) -> bool:
    """Return whether the class of this name has rotary modules and is not refused by its model type."""
    if REFUSED.keys() & set(language_models()[name]):
        return False
    if name in UNBUILT:
        return False
    model = tiny_model(name)
    return any(inv_freq_names(module) for module in model.modules())


def logits(model: Any) -> Tensor | None:
    """Return logits of 28 tokens, [2, 28, V]; None where the model takes more than text."""
    if type(model).__name__ in NEEDS_AUDIO:
        return None
    ids = torch.randint(5, 90, (2, 28), generator=torch.Generator().manual_seed(0))
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **decoder).logits


def stock(model: Any) -> Any:
    """Return a new model of transformers from what `model` would be saved as: its config as JSON, its weights."""
    values = {key: value for key, value in model.config.to_dict().items() if key != "posswap"}
    new = type(model)(type(model.config).from_dict(copy.deepcopy(values))).eval()
    new.load_state_dict(model.state_dict(), strict=True)
    return new


def frequencies(model: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in model.named_buffers() if name.endswith("inv_freq") and "original" not in name}


def problems_of(name: str) -> list[str]:
    """Return what is wrong with the native swaps of the class called `name`."""
    model = tiny_model(name, meta=False)
    before, config = logits(model), model.config.to_dict()
    found = []
    for scheme, options in SWAPS.items():
        try:
            plan = swap_plan(patch_model(model, scheme, **options))
        except UnsupportedSwapError as error:
            if scheme not in NEVER_NATIVE.get(name, ()) and "sees both sides" not in str(error):
                found.append(f"{scheme}: {error}")
            continue
        native = plan.route == "native"
        expected = scheme not in NEVER_NATIVE.get(name, ())
        if native != expected and scheme != "nope" and name not in MAY_BE_PLUGIN:
            found.append(f"{scheme}: {plan.route}")
        after = logits(model)
        if native:
            found += [f"{scheme}: {problem}" for problem in differences(model, after, before)]
        unpatch_model(model)
        restored = logits(model)
        if before is not None and restored is not None and not torch.equal(before, restored):
            found.append(f"{scheme}: not taken back")
        if model.config.to_dict() != config:
            found.append(f"{scheme}: the config is not what it was")
    return found


def differences(model: Any, after: Tensor | None, before: Tensor | None) -> list[str]:
    """Return how a natively swapped `model` differs from a stock one of its config, or not from what it was."""
    new = stock(model)
    held, expected = frequencies(model), frequencies(new)
    found = [key for key in expected if not torch.equal(held[key], expected[key])]
    if after is None or before is None:
        return found
    gap = float((after - logits(new)).abs().max())
    if gap != 0:
        found.append(f"{gap:.3g} away from the stock model")
    if float((after - before).abs().max()) < 1e-4:
        found.append("nothing moved")
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_native_swap_equals_a_stock_model_of_its_config(name: str) -> None:
    assert is_rotary(name)
    assert problems_of(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_native_swap_equals_a_stock_model_of_its_config_in_every_class(shard: int) -> None:
    names = [name for name in sorted(language_models())[shard::SHARDS] if is_rotary(name)]
    assert len(names) >= 5
    wrong = {name: problems for name in names if (problems := problems_of(name))}
    assert wrong == {}


def plant(model: Any, part: nn.Module) -> str:
    """Put `part` into the text part of `model` and return its path."""
    sites = locate(model)
    model.get_submodule(sites.base).planted_positions = part
    return f"{sites.base}.planted_positions".lstrip(".")


class Planted(nn.Module):
    """A rotary module that no family knows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4, device="meta"), persistent=False)


@pytest.mark.parametrize("part", [Planted(), nn.Embedding(32, 64, device="meta")], ids=["rotary", "table"])
@pytest.mark.parametrize("name", [*KINDS, "VoxtralForConditionalGeneration", "DeepseekV4ForCausalLM"])
def test_a_position_part_that_the_family_does_not_mention_is_refused_by_name(name: str, part: nn.Module) -> None:
    model = tiny_model(name)
    path = plant(model, copy.deepcopy(part))
    with pytest.raises(UnsupportedModelError, match=f"'{path}'.*does not mention it"):
        plan_swap(model, "rope")


def test_only_layers_that_see_all_tokens_are_stretched() -> None:
    model = tiny_model("gemma3_text", meta=False)
    local, wide = model.model.rotary_emb.sliding_attention_inv_freq, model.model.rotary_emb.full_attention_inv_freq
    plan = swap_plan(patch_model(model, "linear", factor=4.0))
    assert torch.equal(model.model.rotary_emb.sliding_attention_inv_freq, local)
    assert torch.equal(model.model.rotary_emb.full_attention_inv_freq, wide / 4)
    assert plan.notes[0].startswith("Layers of type sliding_attention keep their own rotation")
    assert parameters_of(model.config, "sliding_attention")["rope_type"] == "default"
    unpatch_model(model)
    patch_model(model, "nope")
    assert not model.model.rotary_emb.sliding_attention_inv_freq.any()
    assert not model.model.rotary_emb.full_attention_inv_freq.any()


def test_a_text_tower_changes_the_text_config_alone() -> None:
    model = tiny_model("gemma3", meta=False)
    vision = model.config.vision_config.to_dict()
    original = model.config
    patch_model(model, "yarn", factor=4.0)
    assert model.config.text_config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    assert model.model.language_model.config is model.config.text_config
    assert model.config.vision_config.to_dict() == vision
    assert original.text_config.rope_parameters["full_attention"]["rope_type"] == "default"
    assert set(model.config.posswap["original"]) == {
        "text_config.max_position_embeddings",
        "text_config.rope_parameters",
    }
    unpatch_model(model)
    assert model.model.language_model.config is model.config.text_config is original.text_config


def test_multimodal_rope_keeps_its_sections() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    model = tiny_model("Qwen3_5ForCausalLM", rope_parameters=parameters)
    own = model.config.rope_parameters
    patch_model(model, "yarn", factor=2.0)
    now = model.config.rope_parameters
    kept = {key: value for key, value in own.items() if key.startswith(("mrope", "partial"))}
    assert "mrope_section" in kept
    assert {key: now[key] for key in kept} == kept


SEES: dict[str, Any] = {
    "text_config": {
        **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
        **{"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.1},
        **{
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        | {"mrope_section": [2, 3, 3], "mrope_interleaved": True},
    },
    "vision_config": {
        **{"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 4},
        **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16},
    },
    **{"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93},
}


def seeing(scheme: str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(**SEES)).eval()
    return model if scheme is None else patch_model(model, scheme, max_length=128, **options)


@pytest.fixture
def image() -> dict[str, Any]:
    ids = torch.tensor([[5, 6, 7, 8, 91, *[90] * 6, 92, *range(10, 19)]])
    pixels = torch.randn(24, 96, generator=torch.Generator().manual_seed(5))
    grid = torch.tensor([[1, 4, 6]])
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == 90).long()}


@pytest.mark.parametrize("scheme", ["alibi", "t5", "native + alibi", "nope"])
def test_a_bias_goes_by_the_place_of_image_tokens_whose_rotation_has_three_axes(
    scheme: str, image: dict[str, Any]
) -> None:
    """The three rows of positions were taken for rows of the batch."""
    model: Any = seeing(scheme)
    whole = model(**image).logits
    rows = model.model.get_rope_index(image["input_ids"], image["mm_token_type_ids"], image["image_grid_thw"])[0]
    places = torch.arange(image["input_ids"].shape[1])[None, None]
    for position_ids in (rows, torch.cat((places, rows))):
        assert torch.equal(model(**image, position_ids=position_ids).logits, whole)
    generated = model.generate(
        **image, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    ids = generated.sequences[:, :-1]
    again = model(**{**image, "input_ids": ids, "mm_token_type_ids": (ids == 90).long()}).logits
    torch.testing.assert_close(torch.stack(generated.logits, dim=1), again[:, -4:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scheme", ["self_extend:window=40,group=8", "rerope:window=60", "dual_chunk", "xpos"])
def test_a_rotation_by_one_position_refuses_images_and_is_exact_for_text(scheme: str, image: dict[str, Any]) -> None:
    """In a generation image tokens were rotated by their place, silently, and a forward ended within torch."""
    model = seeing(scheme)
    assert any("For text alone" in note for note in swap_plan(model).notes)
    for call in (model, lambda **given: model.generate(**given, max_new_tokens=2, do_sample=False)):
        with pytest.raises(UnsupportedSwapError, match="was given images or videos, whose tokens have three positions"):
            call(**image)
    ids = image["input_ids"][:, 12:]
    expected = model(input_ids=ids).logits
    rows = torch.arange(ids.shape[1])[None, None]
    for axes in (3, 4):
        assert torch.equal(model(input_ids=ids, position_ids=rows.expand(axes, 1, -1)).logits, expected)
    if not scheme.startswith("xpos"):  # within its window it is the stock rotation
        torch.testing.assert_close(expected, seeing()(input_ids=ids).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "blt", "mamba"])
def test_a_refused_model_type_says_why(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' is not supported: {REFUSED[model_type][:20]}"):
        plan_swap(tiny_model(model_type), "rope")


def test_a_variant_that_a_family_does_not_describe_is_named() -> None:
    """The refusal of a rotary ESM said that no family describes 'esm', and that 'esm' is a near name."""
    with pytest.raises(
        UnsupportedModelError, match=r"'esm' only this is supported: ESM-1: .*\n.*variant, such as one w"
    ):
        plan_swap(tiny_model("esm", position_embedding_type="rotary"), "rope")


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma3", "t5gemma", "modernbert", "qwen2_audio"])
@pytest.mark.parametrize("scheme", ["yarn", "alibi"])
def test_a_saved_swap_is_loaded_again_and_by_stock_classes_where_it_is_native(
    kind: str, scheme: str, tmp_path: Path
) -> None:
    model = tiny_model(kind, meta=False)
    stock = type(model)
    plan = swap_plan(patch_model(model, scheme, **SWAPS.get(scheme, {})))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), expected)
    if plan.route == "native":
        assert torch.equal(logits(stock.from_pretrained(tmp_path)), expected)
    else:
        with pytest.raises((RuntimeError, KeyError, AttributeError, ValueError), match="posswap"):
            stock.from_pretrained(tmp_path)


def test_latent_attention_takes_its_scale_along() -> None:
    """DeepSeek-V3 reads mscale_all_dim a second time, where its attention is built: a swap changes that too."""
    model = tiny_model("deepseek_v3", meta=False)
    scale = model.model.layers[0].self_attn.scaling
    plan = swap_plan(patch_model(model, "yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0))
    assert plan.route == "native"
    assert model.model.layers[0].self_attn.scaling != scale
    assert torch.equal(logits(model), logits(stock(model)))
    assert "model.layers.0.self_attn.scaling" in [edit.path for edit in plan.edits]
    unpatch_model(model)
    assert model.model.layers[0].self_attn.scaling == scale


def test_pairs_that_stood_still_and_are_to_turn_need_training() -> None:
    """Gemma 4's global layers turn a quarter of their pairs; a scheme that turns all is another mechanism to them."""
    model = tiny_model("gemma4_text")
    assert plan_swap(model, "yarn", factor=4.0).adaptation.startswith(
        "required: fine-tuning, as these pairs were not rotated like this in training"
    )
    assert plan_swap(tiny_model("gemma3_text"), "yarn", factor=4.0).adaptation.startswith("optional")


def test_a_model_that_was_saved_is_planned_as_before(tmp_path: Path) -> None:
    """Saving writes the dtype's name into the config in memory; Apertus makes tensors of what stands there."""
    model = tiny_model("apertus", meta=False)
    before = plan_swap(model, "yarn", factor=2.0)
    model.save_pretrained(tmp_path)
    assert (before.route, plan_swap(model, "yarn", factor=2.0).route) == ("native", "native")


@pytest.mark.parametrize("kind", ["gemma3_text", "llama", "modernbert"])
def test_models_read_from_an_identity_rotation_what_their_own_rotary_module_says(kind: str) -> None:
    """LFM3 asks its rotary module for `layer_types`."""
    model = tiny_model(kind)
    path = locate(model).main.rotary[0]
    native = model.get_submodule(path)
    patch_model(model, "alibi")
    module = model.get_submodule(path)
    assert module is not native
    names = [name for name in vars(native) if not name.startswith("_") and name != "training"]
    assert "layer_types" in names or kind == "llama"
    assert [name for name in names if getattr(module, name) is not getattr(native, name)] == []


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4", "glm_moe_dsa"])
def test_a_model_that_knows_positions_beside_its_rotation_does_not_lose_it(kind: str) -> None:
    with pytest.raises(UnsupportedSwapError, match="nope would leave positions in"):
        plan_swap(tiny_model(kind), "nope")


@pytest.mark.parametrize("site", ["auto", "attention"])
@pytest.mark.parametrize(("scheme", "options"), [("nope", {}), ("yarn", {"factor": 4.0})])
def test_a_cache_changes_of_a_model_with_mamba_between_what_it_changes_of_stock(
    scheme: str, options: dict[str, Any], site: Any
) -> None:
    """Zamba2's steps differ from its whole forward by more than rounding: its Mamba layers compute them otherwise."""
    model = tiny_model("zamba2", meta=False)
    patch_model(model, scheme, site=site, **options)
    native = patch_model(tiny_model("zamba2", meta=False), scheme, **options)
    stock = type(native)(copy.deepcopy(native.config)).eval()  # which a stock config says
    stock.load_state_dict(dict(model.state_dict()))
    found, expected = in_steps(model), in_steps(stock)
    assert (found - expected).abs().max() < 2e-4
    with torch.no_grad():
        assert (expected - stock(input_ids=STEPS, use_cache=False).logits).abs().max() > 1e-3


STEPS = torch.arange(40).view(2, 20).mul(7).remainder(61) + 6


def in_steps(model: Any) -> Tensor:
    """Return logits of a text that is read in parts upon a cache."""
    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        for start, stop in ((0, 10), *((at, at + 1) for at in range(10, 20))):
            out = model(input_ids=STEPS[:, start:stop], use_cache=True, **with_cache(model, cache))
            parts.append(out.logits)
    return torch.cat(parts, dim=1)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.21"), reason="this transformers is no oracle of it")
def test_longrope_by_layer_type_is_computed_here_where_transformers_cannot_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Releases before 5.21 stop at the second text beyond the original length; newer ones are the oracle."""
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=64,
        num_hidden_layers=6, sliding_window=8, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = Gemma3ForCausalLM(config).eval()
    scheme = LongRope(long_factor=(1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.0))
    swapped = {}
    monkeypatch.setenv("POSSWAP_UNTESTED", "allow")
    for version in ("5.21.0", "5.20.2"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        model = copy.deepcopy(stock)
        swapped[version] = (plan_swap(model, scheme, max_length=64).route, patch_model(model, scheme, max_length=64))
    assert [route for route, _ in swapped.values()] == ["native", "plugin"]
    for length in (20, 50, 50, 20, 60):
        text = torch.randint(1, 64, (1, length))
        native, own = (model(text, use_cache=False).logits for _, model in swapped.values())
        torch.testing.assert_close(own, native, rtol=1e-5, atol=1e-5)


ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i / 3 for i in range(8)],
    },
}


@pytest.mark.parametrize("kind", list(ROPE))
@pytest.mark.parametrize("scheme", ["yarn:factor=2", "rope", "dynamic:factor=4", "nope", "native + alibi"])
def test_a_model_that_has_seen_a_long_text_is_swapped_as_before_it(kind: str, scheme: str) -> None:
    """The rotary module of a model whose angles follow the length keeps those of its last text."""
    long = torch.arange(5, 55)[None]
    rope = ROPE[kind] | {"rope_theta": 10000.0}
    fresh, seen, other = (tiny_model("llama", meta=False, rope_parameters=rope) for _ in range(3))
    before = seen(long).logits
    patch_model(fresh, scheme)
    assert swap_plan(patch_model(seen, scheme)) == swap_plan(fresh)
    assert torch.equal(seen(long).logits, fresh(long).logits)
    assert torch.equal(unpatch_model(seen)(long).logits, before)
    other.model.rotary_emb.inv_freq = other.model.rotary_emb.inv_freq * 2  # by other code than its own
    other.model.rotary_emb.original_inv_freq = other.model.rotary_emb.inv_freq
    if scheme != "native + alibi":
        with pytest.raises(UnsupportedSwapError, match="does not follow the model's config"):
            patch_model(other, scheme)
