"""Aggregates against loops and closed forms; one pass against a pass for each length."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_posswap import patch_model
from hf_posswap.errors import DataError
from hf_posswap.evaluation import (
    change_with_length,
    loss_by_position,
    measure_losses,
    perplexity_by_length,
    ratio_interval,
    sliding_losses,
)

LENGTHS = [8, 16, 32, 64]


def swapped(scheme: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    patch_model(model, scheme, max_length=64)
    return model


@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal", "nope", "learned"])
def test_one_pass_gives_what_a_loop_over_lengths_gives(scheme: str) -> None:
    model, documents = swapped(scheme), np.random.default_rng(0).integers(0, 50, (5, 64))
    one = perplexity_by_length(measure_losses(model, documents, LENGTHS, one_pass=True))
    for score, length in zip(one, LENGTHS, strict=True):
        ids = torch.from_numpy(documents[:, :length])
        with torch.no_grad():
            loss = model(ids, labels=ids).loss.item()
        assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
        assert (score.length, score.documents, score.tokens) == (length, 5, 5 * (length - 1))
        assert score.low is not None
        assert score.high is not None
        assert score.low <= score.perplexity <= score.high


def test_a_scheme_that_follows_the_total_length_needs_a_pass_for_each() -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, rope_parameters=rope, initializer_range=0.5,
    )  # fmt: skip
    model, documents = LlamaForCausalLM(config).eval(), np.random.default_rng(0).integers(0, 50, (2, 64))
    fresh = copy.deepcopy(model)  # such a model keeps the frequencies of the longest text it has seen
    each = measure_losses(model, documents, [16, 64], one_pass=False)
    short = torch.from_numpy(documents[:, :16])
    with torch.no_grad():
        assert each[16].mean() == pytest.approx(fresh(short, labels=short).loss.item(), abs=1e-4)
        long = torch.from_numpy(documents)
        fresh = copy.deepcopy(fresh)  # the total length counts the last token, as transformers' own loss reads it
        assert each[64].mean() == pytest.approx(fresh(long, labels=long).loss.item(), abs=1e-5)
    one = measure_losses(model, documents, [16, 64], one_pass=True)
    assert np.abs(one[16] - each[16]).max() > 1e-2  # which is why one pass would be wrong here
    np.testing.assert_array_equal(one[64], each[64])


@pytest.mark.parametrize(
    ("shape", "lengths"), [((2, 10), [11]), ((2, 10), [1]), ((2, 10), []), ((0, 10), [4]), ((10,), [4])]
)
def test_lengths_that_cannot_be_read_are_refused(shape: tuple[int, ...], lengths: list[int]) -> None:
    with pytest.raises(DataError, match=r"lengths .* cannot be read of documents"):
        measure_losses(swapped("rope"), np.zeros(shape, dtype=np.int64), lengths, one_pass=True)


@given(st.integers(2, 70), st.integers(5, 8), st.integers(0, 5))
def test_buckets_are_means_over_powers_of_two(length: int, documents: int, first: int) -> None:
    losses = np.random.default_rng(length).gamma(2.0, size=(documents, length - 1)).astype(np.float32)
    by_position: dict[int, list[float]] = {}
    for row in losses:
        for position, loss in enumerate(row, start=first):
            by_position.setdefault(position.bit_length(), []).append(float(loss))
    scores = loss_by_position(losses, first=first)
    complete = [2**k for k in range(8) if len(by_position.get(k + 1, [])) == 2**k * documents]
    assert [score.start for score in scores] == complete
    for score in scores:
        values = by_position[score.start.bit_length()]
        assert score.stop == 2 * score.start <= length - 1 + first
        assert len(values) == documents * score.start
        assert score.loss == pytest.approx(math.fsum(values) / len(values), rel=1e-6)
        assert score.low is not None
        assert score.high is not None
        assert score.low - 1e-9 <= score.loss <= score.high + 1e-9


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        centres = random.normal(2.0, 0.5, 40)  # documents differ, tokens of one are alike
        counts = random.integers(50, 200, 40)
        sums = centres * counts + random.normal(0.0, 0.3, 40) * np.sqrt(counts)
        interval = ratio_interval(sums, counts, draws=400, seed=trial)
        assert interval is not None
        covered += interval[0] <= 2.0 <= interval[1]
    assert 0.90 <= covered / 300 <= 0.98


def test_the_interval_is_the_normal_one_where_that_holds() -> None:
    values = np.random.default_rng(2).normal(5.0, 2.0, 400)
    interval = ratio_interval(values, np.ones(400))
    assert interval is not None
    low, high = interval
    half = 1.96 * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.2 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.2 * half)


@pytest.mark.parametrize(("sums", "counts"), [([], []), ([1.0], [0]), ([1.0, 2.0], [1])])
def test_an_interval_of_nothing_is_refused(sums: list[float], counts: list[int]) -> None:
    with pytest.raises(DataError, match="expected one sum and one positive count per document"):
        ratio_interval(np.array(sums), np.array(counts))


def test_the_change_is_paired() -> None:
    random = np.random.default_rng(0)
    levels = random.normal(3.0, 1.0, (30, 1))  # documents differ by far more than lengths do
    short = levels + random.normal(0.0, 0.01, (30, 7))
    long = np.concatenate([short, levels + 0.1 + random.normal(0.0, 0.01, (30, 8))], axis=1)
    ratio, low, high = change_with_length({8: short, 16: long})
    perplexities = [score.perplexity for score in perplexity_by_length({8: short, 16: long})]
    assert ratio == pytest.approx(perplexities[1] / perplexities[0])
    assert 1.0 < low < ratio < high < 1.1


def test_sliding_losses_are_those_of_the_strided_loop_of_transformers_guide() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    model, documents = GPT2LMHeadModel(config).eval(), np.random.default_rng(0).integers(0, 50, (2, 64))
    losses = sliding_losses(model, documents, window=16)
    assert losses.shape == (2, 63)
    for document, row in zip(documents, losses, strict=True):
        total, previous = 0.0, 0
        for begin in range(0, 64, 8):
            end = min(begin + 16, 64)
            ids = torch.from_numpy(document[None, begin:end])
            labels = ids.clone()
            labels[:, : -(end - previous)] = -100  # scored in an earlier window
            labels[:, 0] = -100
            with torch.no_grad():
                total += model(ids, labels=labels).loss.item() * int((labels != -100).sum())
            previous = end
            if end == 64:
                break
        assert float(row.sum()) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(("window", "length"), [(15, 30), (16, 40), (7, 7), (2, 9), (9, 64)])
def test_each_token_is_predicted_from_its_own_window_alone(window: int, length: int) -> None:
    """Brute force: a forward a token, from the first window that reaches it; whatever the lengths divide."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    model, document = GPT2LMHeadModel(config).eval(), np.random.default_rng(0).integers(0, 50, length)
    losses = sliding_losses(model, document[None], window)[0]
    for token in range(1, length):
        start = 0
        while start + window <= token:
            start += window // 2
        assert start == 0 or window / 2 <= token - start < window  # half a window before it, never a whole one
        with torch.no_grad():
            logits = model(torch.from_numpy(document[None, start:token])).logits[0, -1]
        assert losses[token - 1] == pytest.approx(-torch.log_softmax(logits, -1)[document[token]].item(), abs=1e-4)


@pytest.mark.parametrize(
    ("window", "documents", "message"),
    [
        (1, np.zeros((2, 8), dtype=np.int64), "a sliding window holds at least 2 tokens, got 1"),
        (4, np.zeros((2, 1), dtype=np.int64), "a text of 2 tokens or more"),
        (4, np.zeros((0, 8), dtype=np.int64), r"at least one of them, got shape \(0, 8\)"),
        (4, np.zeros(8, dtype=np.int64), r"token ids \[N, L\]"),
    ],
)
def test_windows_that_cannot_be_are_refused(window: int, documents: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        sliding_losses(swapped("rope"), documents, window)
