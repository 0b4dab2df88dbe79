"""The permutation between rotary layouts: a real interleaved model against its half-split twin, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model, permute_rows, unpatch_model
from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Layout
from tests.stock import cache_in, with_cache

HEADS, GROUPS, WIDTH = 4, 2, 16


def glm(partial: float) -> Any:
    """Return a tiny GLM (interleaved), random, with biases."""
    torch.manual_seed(0)
    config = GlmConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=WIDTH,
        vocab_size=61,
        max_position_embeddings=64,
        attention_bias=True,
        initializer_range=0.2,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial},
    )
    model = GlmForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias.normal_()
    return model


def permute(model: Any, rotary_dim: int, source: Layout, target: Layout) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, heads in ((layer.self_attn.q_proj, HEADS), (layer.self_attn.k_proj, GROUPS)):
                projection.weight.copy_(permute_rows(projection.weight, heads, rotary_dim, source, target))
                projection.bias.copy_(permute_rows(projection.bias, heads, rotary_dim, source, target))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 50)[None]).logits


@pytest.mark.parametrize("partial", [0.5, 1.0])
def test_a_half_split_twin_computes_what_the_interleaved_model_does(partial: float) -> None:
    model, twin = glm(partial), glm(partial)
    patch_model(twin, "rope", layout="half", site="attention")
    wrong = logits(twin)
    permute(twin, int(WIDTH * partial), "interleaved", "half")
    torch.testing.assert_close(logits(twin), logits(model), rtol=0, atol=2e-5)  # sums in another order
    assert (wrong - logits(model)).abs().max() > 0.5


def interleave(model: Any) -> None:
    """Give a half-split Llama the rows and the rotation of the interleaved layout."""
    config = model.config
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for projection, heads in (
                (attention.q_proj, config.num_attention_heads),
                (attention.k_proj, config.num_key_value_heads),
            ):
                rows = permute_rows(projection.weight, heads, attention.head_dim, "half", "interleaved")
                projection.weight.copy_(rows)
    patch_model(model, "rope", layout="interleaved")


def test_a_llama_of_interleaved_rows_and_rotation_computes_what_the_half_split_one_does() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=WIDTH,
        vocab_size=61,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    expected = logits(model)
    interleave(model)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-5)
    cached = cache_in(model(input_ids=torch.arange(1, 30)[None], use_cache=True))
    step = model(input_ids=torch.arange(30, 50)[None], **with_cache(model, cached)).logits
    torch.testing.assert_close(step, expected[:, 29:], rtol=0, atol=2e-5)
    unpatch_model(model)
    assert (logits(model) - expected).abs().max() > 0.5  # interleaved rows under a half-split rotation


def test_a_trained_llama_survives_the_permutation(shared_checkpoints: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(shared_checkpoints / "stories260K").eval()
    expected = logits(model)
    interleave(model)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)


def test_a_glm_becomes_a_stock_llama() -> None:
    """transformers' own half-split model, no plugin in it, holds the permuted weights of an interleaved one."""
    model = glm(1.0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=WIDTH,
        vocab_size=61,
        attention_bias=True,
        rms_norm_eps=model.config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    llama = LlamaForCausalLM(config).eval()
    expected = logits(model)
    permute(model, WIDTH, "interleaved", "half")
    weights = model.state_dict()
    for index in range(2):
        gate, up = weights.pop(f"model.layers.{index}.mlp.gate_up_proj.weight").chunk(2)
        weights |= {f"model.layers.{index}.mlp.gate_proj.weight": gate, f"model.layers.{index}.mlp.up_proj.weight": up}
        weights[f"model.layers.{index}.self_attn.o_proj.bias"] = torch.zeros(64)
    llama.load_state_dict(weights)
    torch.testing.assert_close(logits(llama), expected, rtol=0, atol=2e-5)


@given(heads=st.integers(1, 5), pairs=st.integers(1, 9), passed=st.integers(0, 5), columns=st.integers(0, 3))
def test_rows_go_where_the_definition_says_and_come_back(heads: int, pairs: int, passed: int, columns: int) -> None:
    width = 2 * pairs + passed
    weight = torch.randn(heads * width, *([columns] if columns else []))
    moved = permute_rows(weight, heads, 2 * pairs, "half", "interleaved")
    for head in range(heads):
        start = head * width
        for pair in range(pairs):
            assert torch.equal(moved[start + 2 * pair], weight[start + pair])
            assert torch.equal(moved[start + 2 * pair + 1], weight[start + pairs + pair])
        assert torch.equal(moved[start + 2 * pairs : start + width], weight[start + 2 * pairs : start + width])
    assert torch.equal(permute_rows(moved, heads, 2 * pairs, "interleaved", "half"), weight)
    assert torch.equal(permute_rows(weight, heads, 2 * pairs, "half", "half"), weight)


@pytest.mark.parametrize(
    ("shape", "heads", "rotary_dim", "source", "says"),
    [
        ((12, 3), 5, 4, "half", r"each head, got shape \(12, 3\) and 5 heads; give the key projection's own number"),
        ((12, 3), 0, 4, "half", r"got shape \(12, 3\) and 0 heads"),
        ((), 1, 4, "half", r"got shape \(\) and 1 heads"),
        ((12, 3), 2, 5, "half", "even, at least 2 and at most the 6 dimensions of a head, got 5"),
        ((12, 3), 2, 8, "half", "at most the 6 dimensions of a head, got 8"),
        ((12, 3), 2, 0, "half", "at least 2 .* got 0"),
        ((12, 3), 2, 4, "split", "source must be one of 'half', 'interleaved', got 'split'"),
    ],
)
def test_impossible_rows_and_layouts_are_refused(
    shape: tuple[int, ...], heads: int, rotary_dim: int, source: Any, says: str
) -> None:
    with pytest.raises(SchemeError, match=f"permute_rows: .*{says}"):
        permute_rows(torch.zeros(shape), heads, rotary_dim, source, "interleaved")
