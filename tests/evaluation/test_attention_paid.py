"""Attention by distance: brute force over what stock transformers gives under output_attentions=True."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from hf_posswap import patch_model
from hf_posswap.errors import DataError, NotEnoughMemoryError, PositionRangeError, UnsupportedModelError
from hf_posswap.evaluation import AttentionPaid, attention_by_distance
from hf_posswap.evaluation import attention_paid as module
from tests.contract.models import VOCABULARY
from tests.contract.twins import neox_of_gpt2

TEXTS = np.random.default_rng(0).integers(3, VOCABULARY, size=(2, 24))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=VOCABULARY, n_positions=32, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


def mistral(window: int | None) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window, initializer_range=0.3,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def bert() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return BertModel(config).eval()


def brute_force(model: Any, texts: np.ndarray, *, causal: bool) -> tuple[list[dict[int, float]], list[float]]:
    """Return, layer by layer, the mean weight at each distance and what the first token is paid, one pair at a time."""
    model.set_attn_implementation("eager")
    means, firsts = [], []
    with torch.no_grad():
        every = model(torch.from_numpy(texts), output_attentions=True).attentions  # [B, H, N, N] of each layer
    for weights in every:
        at, first = defaultdict(list), []
        for text in weights:
            for head in text:
                for query in range(1, len(head)):
                    first.append(float(head[query, 0]))
                    for key in range(1, query + 1 if causal else len(head)):
                        at[abs(query - key)].append(float(head[query, key]))
        means.append({distance: float(np.mean(values)) for distance, values in at.items()})
        firsts.append(float(np.mean(first)))
    return means, firsts


def agrees(paid: AttentionPaid, expected: tuple[list[dict[int, float]], list[float]]) -> None:
    means, firsts = expected
    assert paid.means.shape == (len(means), len(means[0]))
    for layer, by_distance in enumerate(means):
        assert paid.means[layer].tolist() == pytest.approx([by_distance[d] for d in sorted(by_distance)], abs=1e-6)
    assert paid.first.tolist() == pytest.approx(firsts, abs=1e-6)
    assert float(paid.shares.sum(dim=1)[0] + paid.first[0]) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("build", "causal"), [(gpt2, True), (lambda: mistral(None), True), (lambda: mistral(6), True), (bert, False)]
)
@pytest.mark.parametrize("most_bytes", [1 << 30, 1])
def test_it_is_what_stock_attention_says_one_pair_at_a_time(build: Any, causal: bool, most_bytes: int) -> None:
    paid = attention_by_distance(build(), TEXTS, most_bytes=most_bytes)  # whole, or in pieces of 16 with a cache
    agrees(paid, brute_force(build(), TEXTS, causal=causal))
    assert paid.causal == causal


def test_a_swapped_model_pays_what_its_stock_twin_does() -> None:
    swapped = patch_model(gpt2(), "rope")
    agrees(attention_by_distance(swapped, TEXTS), brute_force(neox_of_gpt2(gpt2()), TEXTS, causal=True))


@pytest.mark.parametrize("scheme", ["alibi", "self_extend:window=8,group=4", "t5", "nope", "sinusoidal"])
def test_schemes_of_every_kind_give_weights_alike_in_pieces(scheme: str) -> None:
    swapped = patch_model(gpt2(), scheme, max_length=32)
    whole, pieces = attention_by_distance(swapped, TEXTS), attention_by_distance(swapped, TEXTS, most_bytes=1)
    torch.testing.assert_close(whole.means, pieces.means, atol=1e-6, rtol=1e-4)
    assert float((whole.shares.sum(dim=1) + whole.first - 1).abs().max()) < 1e-5


def bart() -> Any:
    torch.manual_seed(0)
    size = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 2, "decoder_layers": 1}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **size, **heads)
    ).eval()


def t5() -> Any:
    torch.manual_seed(0)
    size = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **size)).eval()


@pytest.mark.parametrize("make", [bart, t5])
@pytest.mark.parametrize("scheme", [None, "alibi"])
def test_of_an_encoder_decoder_the_encoder_is_read(make: Any, scheme: str | None) -> None:
    model = make() if scheme is None else patch_model(make(), scheme)
    paid = attention_by_distance(model, TEXTS)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = torch.as_tensor(TEXTS)
        seen = model(input_ids=ids, decoder_input_ids=ids[:, :1], output_attentions=True).encoder_attentions
    length, expected = ids.shape[1], defaultdict(list)
    for q in range(1, length):
        for k in range(1, length):
            expected[abs(q - k)].append(torch.stack([layer[:, :, q, k].mean() for layer in seen]))
    assert not paid.causal
    means = torch.stack([torch.stack(expected[d]).mean(dim=0) for d in range(length - 1)], dim=1)
    torch.testing.assert_close(paid.means, means.double(), atol=1e-6, rtol=1e-4)
    assert float((paid.shares.sum(dim=1) + paid.first - 1).abs().max()) < 1e-5


def test_half_and_beyond_are_shares_of_the_attention() -> None:
    totals = torch.tensor([[6.0, 2.0, 1.0, 1.0]]).double()
    paid = AttentionPaid(5, 4, totals, torch.tensor([0.375]).double(), causal=True)
    assert paid.shares.tolist() == [[0.375, 0.125, 0.0625, 0.0625]]
    assert (paid.half, paid.beyond(1), paid.beyond(3)) == (0, 0.125, 0.0)
    assert paid.pairs.tolist() == [16, 12, 8, 4]
    flat = AttentionPaid(5, 1, torch.ones(2, 4).double(), torch.zeros(2), causal=True)
    assert flat.half == 1


def test_the_model_is_left_as_it_was() -> None:
    model = patch_model(gpt2(), "alibi").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention_by_distance(model, TEXTS)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"rows of at least 2 tokens, got \(5,\)"):
        attention_by_distance(gpt2(), np.arange(5))
    with pytest.raises(PositionRangeError, match="ends at 32 tokens, and the texts have 40"):
        attention_by_distance(gpt2(), np.zeros((1, 40), int))
    vit = ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(UnsupportedModelError, match="ViTModel reads pixel_values"):
        attention_by_distance(vit, TEXTS)
    monkeypatch.setattr(module, "available_bytes", lambda device: 1000)
    with pytest.raises(NotEnoughMemoryError, match="cannot read a text in chunks: give shorter texts"):
        attention_by_distance(bert(), TEXTS, most_bytes=1)  # type: ignore[arg-type]
