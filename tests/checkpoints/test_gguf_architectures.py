"""GGUF files of each architecture: names and keys that `gguf` knows, the model that comes back, and what is refused.

Whether llama.cpp computes the same from them is tested by tests/serving/test_llamacpp.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.checkpoints.exports.run import export
from hf_posswap.errors import CheckpointError, UnsupportedSwapError
from hf_posswap.rope_math import permute_rows
from tests.checkpoints.test_gguf_source import edited, gap
from tests.gguf_models import tiny

Case = tuple[str, dict[str, Any], str | None, dict[str, Any], dict[str, Any]]
SHORT, LONG = [1.0, 1.5] * 4, [2.0, 3.0] * 4
ORIGINAL = "rope.scaling.original_context_length"
LAYERS = {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}
LAYERS["sliding_attention"] = {"rope_type": "default", "rope_theta": 2e3}
OTHER_ORDER = ["full_attention", "sliding_attention"] * 2
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, ORIGINAL: 32}
TWO_LISTS = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT[:6], "long_factor": LONG[:6],
    "attention_factor": 1.25, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, Case] = {
    "qwen3": ("qwen3", {}, None, {}, {"attention.key_length": 32, "rope.dimension_count": 32}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}, None, {}, {}),
    "qwen3 yarn": ("qwen3", {}, "yarn", {"factor": 4.0}, YARN | {"context_length": 128}),
    "qwen3 yarn, other attention": (
        "qwen3", {}, "yarn", {"factor": 4.0, "attention_factor": 1.5},
        YARN | {"rope.scaling.attn_factor": 1.5 / (0.1 * np.log(4.0) + 1)},
    ),
    "qwen3 linear": ("qwen3", {}, "linear", {"factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4}),
    "qwen3 ntk": ("qwen3", {}, "ntk", {"factor": 4.0}, {}),
    "qwen2_moe": (
        "qwen2_moe", {}, None, {},
        {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32,
         "expert_shared_feed_forward_length": 64},
    ),
    "qwen2_moe tied": ("qwen2_moe", {"tie_word_embeddings": True}, None, {}, {}),
    "qwen2_moe yarn": ("qwen2_moe", {}, "yarn", {"factor": 4.0}, YARN),
    "qwen3_moe": ("qwen3_moe", {}, None, {}, {"expert_count": 8, "expert_used_count": 3, "attention.key_length": 32}),
    "qwen3_moe linear": ("qwen3_moe", {}, "linear", {"factor": 2.0}, {"rope.scaling.factor": 2.0}),
    "gemma3": (
        "gemma3", {}, None, {}, {"attention.sliding_window": 8, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
    ),
    "gemma3 thetas": (
        "gemma3", {"rope_parameters": LAYERS}, None, {}, {"rope.freq_base": 5e4, "rope.freq_base_swa": 2e3}
    ),
    "gemma3 layers": (
        "gemma3", {"num_hidden_layers": 4, "layer_types": OTHER_ORDER, "final_logit_softcapping": 9.0}, None, {},
        {"attention.sliding_window_pattern": [False, True] * 2, "final_logit_softcapping": 9.0},
    ),
    "gemma3 all full": ("gemma3", {"layer_types": ["full_attention"] * 7}, None, {}, {}),
    "gemma3 yarn": ("gemma3", {}, "yarn", {"factor": 4.0}, YARN | {"rope.freq_base_swa": 1e4}),
    "gemma3 linear": ("gemma3", {}, "linear", {"factor": 4.0}, {"rope.scaling.type": "linear"}),
    "phi3": ("phi3", {}, None, {}, {"rope.dimension_count": 16}),
    "phi3 part of the head": (
        "phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}, None,
        {}, {"rope.dimension_count": 12},
    ),
    "phi3 window": ("phi3", {"sliding_window": 16}, None, {}, {"attention.sliding_window": 16}),
    "mistral window": ("mistral", {"sliding_window": 16}, None, {}, {}),
    "phi3 yarn": ("phi3", {}, "yarn", {"factor": 4.0}, {"rope.scaling.attn_factor": 0.1 * np.log(4.0) + 1}),
    "phi3 llama3": ("phi3", {}, "llama3", {"factor": 4.0}, {}),
    "phi3 two lists": (
        "phi3", {"rope_parameters": TWO_LISTS, "original_max_position_embeddings": 16}, None, {},
        {"rope.scaling.type": "longrope", ORIGINAL: 16, "rope.scaling.attn_factor": 1.25, "rope.dimension_count": 12},
    ),
    "smollm3": ("smollm3", {}, None, {}, {"attention.head_count_kv": 2}),
    "smollm3 yarn": ("smollm3", {}, "yarn", {"factor": 4.0}, YARN),
}  # fmt: skip
"""The model, fields of its config, a swap with its options, and keys that the file must have."""
KEYS = {
    value
    for group in vars(gguf.constants.Keys).values()
    if isinstance(group, type)
    for name, value in vars(group).items()
    if isinstance(value, str) and not name.startswith("_")
}


def file_of(folder: Path, case: str) -> tuple[Path, Any]:
    """Return the file of a case, and the model that was saved."""
    name, changes, scheme, options, _ = CASES[case]
    model = tiny(name, **changes)
    if scheme is not None:
        patch_model(model, scheme, **options)
    hf_posswap.save(model, folder / "saved")
    export(folder / "saved", "llamacpp", folder / "m.gguf")
    return folder / "m.gguf", hf_posswap.load(folder / "saved")


@pytest.mark.parametrize("case", list(CASES))
def test_keys_and_tensors_are_those_of_the_architecture(case: str, tmp_path: Path) -> None:
    path, _ = file_of(tmp_path, case)
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    name = fields["general.architecture"]
    assert {key.replace(name, "{arch}") for key in fields if key.startswith(f"{name}.")} <= KEYS
    known = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    kinds = {gguf.constants.TENSOR_NAMES[kind].replace("{bid}", "0") for kind in gguf.constants.MODEL_TENSORS[known]}
    stems = {tensor.name.rpartition(".")[0] for tensor in reader.tensors}
    assert {stem if not stem.startswith("blk.") else f"blk.0.{stem.split('.', 2)[2]}" for stem in stems} <= kinds
    for key, value in CASES[case][4].items():
        assert fields[f"{name}.{key}"] == (value if isinstance(value, (str, list)) else pytest.approx(value)), key
    scaled = CASES[case][2] is not None or "lists" in case
    assert scaled or not [key for key in fields if ".rope.scaling." in key]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(("smollm3", "mistral"))])
def test_the_model_comes_back_from_its_file(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(tmp_path / "cache"))
    path, model = file_of(tmp_path, case)
    loaded = hf_posswap.load(path)
    assert type(loaded) is type(model)
    assert gap(model, loaded) < (1e-4 if "gemma3" in case or "other attention" in case else 1e-30)  # float32 there
    for name in ("layer_types", "sliding_window", "num_experts", "norm_topk_prob", "head_dim"):
        if name != "sliding_window" or case != "gemma3 all full":  # of no use there
            assert getattr(loaded.config, name, None) == getattr(model.config, name, None), name


def test_the_weights_of_a_smollm3_lie_as_those_of_a_llama(tmp_path: Path) -> None:
    path, model = file_of(tmp_path, "smollm3")
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    layer = model.model.layers[1].self_attn
    for name, weight, heads in (("q", layer.q_proj.weight, 4), ("k", layer.k_proj.weight, 2)):
        assert torch.equal(permute_rows(tensors[f"blk.1.attn_{name}.weight"], heads, 16, "interleaved", "half"), weight)
    assert torch.equal(tensors["blk.1.attn_v.weight"], layer.v_proj.weight)
    assert len(tensors) == len(list(model.parameters()))
    with pytest.raises(CheckpointError, match="is of architecture 'smollm3', and GGUF files are read here of"):
        hf_posswap.load(path)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_experts_lie_in_three_tensors_and_their_router_is_not_rounded(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    hf_posswap.save(model, tmp_path / "x")
    export(tmp_path / "x", "llamacpp", tmp_path / "m.gguf", dtype="bf16")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    experts = model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.detach().bfloat16().float().chunk(2, dim=1)
    down = experts.down_proj.detach().bfloat16().float()
    for kind, expected in (("gate", gate), ("up", up), ("down", down)):
        tensor = tensors[f"blk.1.ffn_{kind}_exps.weight"]
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected.numpy())
    router = tensors["blk.1.ffn_gate_inp.weight"]
    assert router.tensor_type.name == "F32"
    np.testing.assert_array_equal(router.data, model.model.layers[1].mlp.gate.weight.detach().numpy())


def test_a_moe_of_16_bits_comes_back_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(tmp_path / "cache"))
    hf_posswap.save(tiny("qwen3_moe").to(torch.bfloat16), tmp_path / "x")
    export(tmp_path / "x", "llamacpp", tmp_path / "m.gguf")
    assert hf_posswap.load(tmp_path / "m.gguf").dtype == torch.bfloat16


REFUSED: dict[str, tuple[str, dict[str, Any], str | None, dict[str, Any], str]] = {
    "qwen3 biases": ("qwen3", {"attention_bias": True}, None, {}, "has no self_attn.k_proj.bias, self_attn.o_proj"),
    "qwen3 llama3": ("qwen3", {}, "llama3", {"factor": 4.0}, "reads no rope_freqs.weight and no betas"),
    "qwen3 betas": ("qwen3", {}, "yarn", {"factor": 4.0, "beta_fast": 16}, "reads no rope_freqs.weight and no betas"),
    "qwen3 activation": ("qwen3", {"hidden_act": "gelu"}, None, {}, "computes hidden_act 'silu' .* has 'gelu'"),
    "qwen3_moe top k": ("qwen3_moe", {"norm_topk_prob": False}, None, {}, "norm_topk_prob True .* has False"),
    "qwen2_moe top k": ("qwen2_moe", {"norm_topk_prob": True}, None, {}, "norm_topk_prob False .* has True"),
    "qwen3_moe layers": ("qwen3_moe", {"mlp_only_layers": [0]}, None, {}, r"mlp_only_layers \[\] .* has \[0\]"),
    "qwen2_moe step": ("qwen2_moe", {"decoder_sparse_step": 2}, None, {}, "decoder_sparse_step 1 .* has 2"),
    "gemma3 llama3": ("gemma3", {}, "llama3", {"factor": 4.0}, "gemma3 has one scaling, for the layers of full"),
    "gemma3 attention": (
        "gemma3", {}, "yarn", {"factor": 4.0, "attention_factor": 1.5}, "gemma3 has one scaling, for the layers of full"
    ),
    "gemma3 sliding": (
        "gemma3",
        {"rope_parameters": LAYERS | {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
        None, {}, "gemma3 has one scaling, for the layers of full",
    ),
    "gemma3 scale": ("gemma3", {"query_pre_attn_scalar": 64}, None, {}, "query_pre_attn_scalar 32 .* has 64"),
    "gemma3 caps": ("gemma3", {"attn_logit_softcapping": 5.0}, None, {}, "attn_logit_softcapping None .* has 5.0"),
    "smollm3 every layer": ("smollm3", {"no_rope_layers": [1] * 5}, None, {}, "rotates in all layers but every fourth"),
    "smollm3 biases": ("smollm3", {"mlp_bias": True}, None, {}, "has no mlp.down_proj.bias, mlp.gate_proj.bias"),
    "phi3 lists and a window": (
        "phi3", {"rope_parameters": TWO_LISTS, "original_max_position_embeddings": 16, "sliding_window": 16}, None, {},
        "no sliding window and no angles that follow the text's length",
    ),
    "qwen3 window and lists": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        "llama3", {"factor": 4.0}, "no sliding window and reads no rope_freqs.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_llamacpp_computes_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    name, changes, scheme, options, message = REFUSED[case]
    model = tiny(name, **changes)
    if scheme is not None:
        patch_model(model, scheme, **options)
    hf_posswap.save(model, tmp_path / "x")
    with pytest.raises(UnsupportedSwapError, match=message):
        export(tmp_path / "x", "llamacpp", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("name", ["qwen3", "smollm3", "phi3"])
def test_beyond_a_window_that_llamacpp_does_not_have_the_verdict_says_how_far(name: str, tmp_path: Path) -> None:
    fields = {} if name == "phi3" else {"use_sliding_window": True}
    if name == "qwen3":
        fields["max_window_layers"] = 0
    hf_posswap.save(tiny(name, sliding_window=8, **fields), tmp_path / "x")
    found = export(tmp_path / "x", "llamacpp")
    assert (found.verdict, found.why.rpartition(": ")[2]) == ("approximate", "equal up to 8 tokens.")
    assert found.command.endswith("-c 8")


def test_gemma3s_order_of_layers_is_read_in_each_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(tmp_path / "cache"))
    path, _ = file_of(tmp_path, "gemma3")
    every_third = edited(path, tmp_path / "b.gguf", {"gemma3.attention.sliding_window_pattern": 3})
    kinds = [kind.partition("_")[0] for kind in hf_posswap.load(every_third).config.layer_types]
    assert kinds == ["sliding", "sliding", "full", "sliding", "sliding", "full", "sliding"]
    short = edited(path, tmp_path / "c.gguf", {"gemma3.attention.sliding_window_pattern": [True, False]})
    with pytest.raises(CheckpointError, match=r"says of 2 layers whether they slide .* and has 7"):
        hf_posswap.load(short)


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix with each 32 weights of a row as -127 to 127 times one scale, and how near that is."""
    blocks = weight.detach().float().reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    steps = torch.where(scale > 0, blocks * (1 / scale), 0)
    values = steps.sign() * (steps.abs() + 0.5).floor() * scale.half().float()  # halves are rounded away from 0
    bound = (scale * (0.5 + 127 * 2**-11)).expand_as(blocks)  # half a step, and the scale in 16 bits
    return values.reshape(weight.shape), bound.reshape(weight.shape)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2_moe", "qwen3_moe", "gemma3", "phi3"])
def test_8_bits_are_blocks_of_32_with_a_scale(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_POSSWAP_CACHE", str(tmp_path / "cache"))
    model = tiny(name)
    hf_posswap.save(model, tmp_path / "x")
    made = export(tmp_path / "x", "llamacpp", tmp_path / "m.gguf", dtype="q8_0")
    assert made.notes["weights"] == "Q8_0"
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    assert reader.fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    for tensor in reader.tensors:
        whole = len(tensor.shape) < 2 or "ffn_gate_inp" in tensor.name or tensor.name == "position_embd.weight"
        assert tensor.tensor_type.name == ("F32" if whole else "Q8_0"), tensor.name
    loaded, kept = (
        hf_posswap.load(tmp_path / "m.gguf"),
        (".mlp.gate.weight", ".shared_expert_gate.weight", ".wpe.weight"),
    )
    read = dict(loaded.named_parameters())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() < 2 or key.endswith(kept):
                continue
            turned = name == "gpt2" and key.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
            rows = parameter.T.contiguous() if turned else parameter
            values, bound = in_blocks(rows)
            found = read[key].T if turned else read[key]
            assert bool(((found - rows).abs() <= bound * 1.0001 + 1e-9).all()), key
            parameter.copy_(values.T if turned else values)
    assert gap(model, loaded) < (1e-4 if name == "gemma3" else 1e-30)


def test_rows_that_are_no_whole_blocks_are_of_16_bits(tmp_path: Path) -> None:
    hf_posswap.save(tiny("qwen3", intermediate_size=100), tmp_path / "x")
    made = export(tmp_path / "x", "llamacpp", tmp_path / "m.gguf", dtype="q8_0")
    assert made.notes["weights"] == "Q8_0; 2 with rows of no multiple of 32 weights are F16"
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert [name for name, kind in kinds.items() if kind == "F16"] == ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]
    odd = tiny("qwen3", hidden_size=40, intermediate_size=50, head_dim=10)
    hf_posswap.save(odd, tmp_path / "y")
    with pytest.raises(CheckpointError, match="has rows of a multiple of 32 weights, .* give --dtype f16"):
        export(tmp_path / "y", "llamacpp", tmp_path / "n.gguf", dtype="q8_0")
    large = tiny("qwen3")
    with torch.no_grad():
        large.model.layers[0].mlp.up_proj.weight[0, 0] = 1e7  # a scale of 78,740
    hf_posswap.save(large, tmp_path / "z")
    with pytest.raises(CheckpointError, match="up_proj.weight beyond the largest of Q8_0: give --dtype bf16"):
        export(tmp_path / "z", "llamacpp", tmp_path / "n.gguf", dtype="q8_0")
    assert not (tmp_path / "n.gguf").exists()


def test_16_bits_become_8_without_a_rounding_between(tmp_path: Path) -> None:
    model = tiny("llama").to(torch.bfloat16)
    hf_posswap.save(model, tmp_path / "x")
    export(tmp_path / "x", "llamacpp", tmp_path / "m.gguf", dtype="q8_0")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    weight = model.model.layers[1].mlp.down_proj.weight
    values, bound = in_blocks(weight)
    tensor = tensors["blk.1.ffn_down.weight"]
    found = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    assert bool(((found - weight.float()).abs() <= bound * 1.0001).all())
    assert torch.equal(found, values)


ORDERS = {
    "every second": (["sliding_attention", "full_attention"] * 3, "takes layers 6, 12, .* and here they are 2, 4, 6."),
    "the first": (["full_attention"] + ["sliding_attention"] * 6, "takes layers 6, 12, .* and here they are 1."),
    "every sixth": (["sliding_attention"] * 5 + ["full_attention"], "the layers are in llama.cpp's order. What the"),
    "all slide": (["sliding_attention"] * 3, "the layers are in llama.cpp's order. What the"),
}


@pytest.mark.parametrize("order", list(ORDERS))
def test_a_folder_of_a_gemma3_is_refused_for_what_is_true_of_its_layers(order: str, tmp_path: Path) -> None:
    layer_types, message = ORDERS[order]
    hf_posswap.save(tiny("gemma3", layer_types=layer_types, num_hidden_layers=len(layer_types)), tmp_path / "saved")
    with pytest.raises(UnsupportedSwapError, match=f"converter is not written here: its code .*{message}") as refusal:
        export(tmp_path / "saved", "llamacpp", tmp_path / "out")
    assert ("here they are" in str(refusal.value)) == ("takes layers" in message)
    assert "Give -o the name of a .gguf file. Nothing was written." in str(refusal.value)
    assert not (tmp_path / "out").exists()
