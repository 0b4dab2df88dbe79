"""T5's bias against transformers' own T5Attention: buckets, bias, both directions; and what a swap starts with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedModel, T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posswap import patch_model, verify_swap
from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import make_scheme
from hf_posswap.schemes.learned_bias import T5Bias, T5Mechanism, buckets

Geometries = Callable[..., Geometry]


def theirs(query_positions: Tensor, key_positions: Tensor, num_buckets: int, farthest: int, causal: bool) -> Tensor:
    """Return transformers' bucket of each query and key."""
    relative = key_positions[None, :] - query_positions[:, None]
    return T5Attention._relative_position_bucket(
        relative, bidirectional=not causal, num_buckets=num_buckets, max_distance=farthest
    )


@settings(max_examples=200)
@given(side=st.integers(2, 130), beyond=st.integers(1, 3000), causal=st.booleans())
def test_every_bucket_is_transformers(side: int, beyond: int, causal: bool) -> None:
    num_buckets, farthest = (side if causal else 2 * side), side // 2 + beyond
    far = torch.arange(-2 * farthest - 7, 2 * farthest + 8)  # query - key
    expected = theirs(far, torch.zeros(1, dtype=torch.long), num_buckets, farthest, causal)[:, 0]
    found = buckets(num_buckets, farthest, causal=causal)[far.clamp(-farthest, farthest) + farthest]
    assert torch.equal(found, expected)


def test_buckets_have_the_published_sizes() -> None:
    """Raffel et al.: 32 buckets, growing logarithmically to 128 tokens; each for one side of an encoder's halves."""
    past = buckets(32, 128, causal=True)[128:]
    assert past[:16].tolist() == list(range(16))
    assert past.max() == past[-1] == 31
    assert (past.diff() >= 0).all()
    both = buckets(32, 128, causal=False)
    assert both[128:][:8].tolist() == list(range(8))
    assert torch.equal(both[:128].flip(0), both[129:] + 16)


@settings(max_examples=25)
@given(
    heads=st.integers(1, 7),
    causal=st.booleans(),
    rows=st.lists(st.integers(-5, 900), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 300)),
)
def test_the_bias_is_that_of_t5_with_the_same_table(
    geometry: Geometries, heads: int, causal: bool, rows: list[int], sizes: tuple[int, int]
) -> None:
    shape = geometry(num_heads=heads, causal=causal)
    mechanism = T5Bias(init_std=1.0).resolve(shape, None).mechanism(shape)
    config = T5Config(d_model=8 * heads, d_kv=8, num_heads=heads, is_decoder=causal)
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    with torch.no_grad():
        attention.relative_attention_bias.weight.copy_(mechanism.table)
    queries, keys = sizes
    key_positions = torch.arange(keys)[None] + torch.tensor(rows)[:, None]
    query_positions = key_positions[:, -queries:]
    found = mechanism.bias(query_positions, key_positions)
    assert found.dtype == torch.float32
    for row in range(len(rows)):
        numbers = theirs(query_positions[row], key_positions[row], 32, 128, causal)
        assert torch.equal(found[row], attention.relative_attention_bias(numbers).permute(2, 0, 1))
    whole = attention.compute_bias(min(queries, keys), keys, past_seen_tokens=keys - min(queries, keys))
    assert torch.equal(found[:1], whole)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_those_of_t5(geometry: Geometries, causal: bool) -> None:
    shape, positions = geometry(num_heads=3, causal=causal), torch.arange(200)
    mechanism = T5Bias(init_std=1.0).mechanism(shape)
    weight = torch.randn(1, 3, 200, 200, generator=torch.Generator().manual_seed(1))
    (mechanism.bias(positions[None], positions[None]) * weight).sum().backward()
    numbers = theirs(positions, positions, 32, 128, causal)
    expected = torch.zeros(32, 3, dtype=torch.float64)
    expected.index_add_(0, numbers.flatten(), weight[0].permute(1, 2, 0).reshape(-1, 3).double())
    torch.testing.assert_close(mechanism.table.grad.double(), expected, rtol=1e-4, atol=1e-3)


def test_it_begins_at_zero_unless_asked_otherwise(geometry: Geometries) -> None:
    positions = torch.arange(9)[None]
    assert not T5Bias().mechanism(geometry()).bias(positions, positions).any()
    table = T5Bias(num_buckets=2000, max_distance=10000, init_std=0.3).mechanism(geometry(num_heads=16)).table
    assert float(table.detach().std()) == pytest.approx(0.3, rel=0.02)  # of 32000 numbers
    assert isinstance(T5Bias().mechanism(geometry()), T5Mechanism)


def small_gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**size, initializer_range=0.3)).eval()


def test_a_fresh_swap_is_a_model_without_positions() -> None:
    ids = torch.arange(20)[None]
    bare, biased = small_gpt2(), small_gpt2()
    patch_model(bare, "nope")
    patch_model(biased, "t5")
    with torch.no_grad():
        torch.testing.assert_close(biased(ids).logits, bare(ids).logits, rtol=0, atol=1e-5)


def test_verify_swap_knows_a_bias_that_is_still_zero() -> None:
    torch.manual_seed(0)
    size = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    encoder = BertModel(BertConfig(**size, vocab_size=31, initializer_range=0.3)).eval()
    for model in (encoder, small_gpt2()):
        patch_model(model, "t5")
        verify_swap(model)
    found = verify_swap(encoder).checks
    assert all("until it is trained" in found[name] for name in ("spread positions", "order of tokens"))


@pytest.mark.parametrize(
    ("options", "causal", "says"),
    [
        ({"num_buckets": 7}, False, "it must be even and at least 4, got 7."),
        ({"num_buckets": 2}, False, "it must be even and at least 4, got 2."),
        ({"num_buckets": 32, "max_distance": 16}, True, "max_distance must be more than 16, got 16."),
        ({"num_buckets": 32, "max_distance": 8}, False, "max_distance must be more than 8, got 8."),
    ],
)
def test_what_a_model_refuses(geometry: Geometries, options: dict[str, int], causal: bool, says: str) -> None:
    with pytest.raises(SchemeError) as caught:
        T5Bias(**options).resolve(geometry(causal=causal), None)
    assert str(caught.value).startswith("t5: ")
    assert str(caught.value).endswith(says)
    T5Bias(num_buckets=7).resolve(geometry(causal=True), None)  # odd is no harm where all are for the past


START = [[0.5 * h - 0.25 * b for h in range(4)] for b in range(8)]


@pytest.mark.parametrize("causal", [True, False])
def test_a_table_to_begin_with_is_the_table_and_survives_json(geometry: Geometries, causal: bool) -> None:
    scheme = T5Bias(num_buckets=8, max_distance=20, start=START)
    assert make_scheme(json.loads(json.dumps(scheme.to_dict()))) == scheme
    shape = geometry(num_heads=4, causal=causal)
    mechanism: Any = scheme.resolve(shape, None).mechanism(shape)
    assert torch.equal(mechanism.table.detach(), torch.tensor(START))
    assert mechanism.table.requires_grad
    at = torch.tensor([[9, 30]]), torch.tensor([[8, 9, 12]])
    bucket = theirs(at[0][0], at[1][0], 8, 20, causal)
    assert torch.equal(mechanism.bias(*at)[0].detach(), torch.tensor(START)[bucket].permute(2, 0, 1))
    assert str(scheme) == "t5(num_buckets=8, max_distance=20, init_std=0.0, seed=0, start=8x4 numbers)"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"start": 3.0}, r"start must be a list of lists, for each bucket a number for each head, got 3.0\.$"),
        ({"start": "12"}, "start must be a list of lists"),
        ({"start": []}, "start must be a list of lists"),
        ({"start": [[]] * 8}, "start must be a list of lists"),
        ({"start": [1.0] * 8}, "start must be a list of lists"),
        ({"start": [*START[:7], [1.0]]}, "start must be a list of lists"),
        ({"start": START[:7]}, r"start has 7 buckets, and num_buckets is 8\.$"),
        ({"start": [*START[:7], [0.0, 0.0, "x", 0.0]]}, r"start\[7\]\[2\] must be a finite number, got 'x'\.$"),
        ({"start": START, "init_std": 0.5}, r"start already sets the initial table, got init_std=0.5 as well\.$"),
    ],
)
def test_no_table_to_begin_with_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemeError, match=f"^t5: {says}"):
        T5Bias(num_buckets=8, **options)


def test_a_table_for_other_heads_is_refused(geometry: Geometries) -> None:
    scheme = T5Bias(num_buckets=8, start=START)
    with pytest.raises(SchemeError, match=r"t5: start has 4 numbers for each bucket, and this model has 3 heads"):
        scheme.resolve(geometry(num_heads=3), None)
