"""Each protocol against the loop of the script that it is named after, run on the same model and tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap.errors import DataError, UnknownNameError
from hf_posswap.evaluation import Scorer
from hf_posswap.evaluation.compat import PROTOCOLS, protocol_losses, protocol_perplexity

WINDOW, STRIDE, BOS = 16, 4, 49


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=WINDOW, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def texts() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 49, length) for length in (61, 40, 16)]


def labelled_loss(model: GPT2LMHeadModel, ids: list[int], scored: int) -> float:
    """Return the model's own mean loss where only the last `scored` tokens have labels."""
    labels = torch.tensor([[-100] * (len(ids) - scored) + ids[len(ids) - scored :]])
    with torch.no_grad():
        return model(torch.tensor([ids]), labels=labels).loss.item()


def yarn_window_losses(model: GPT2LMHeadModel, texts: list[np.ndarray], bos: int | None) -> list[tuple[float, int]]:
    """Return mean and number of each window's scored tokens, as YaRN's script walks through the texts."""
    found = []
    room = WINDOW - 1 if bos is not None else WINDOW
    for text in texts:
        previous = 0
        for begin in range(0, len(text), STRIDE):
            end = min(begin + room, len(text))
            target = end - previous
            ids = ([] if bos is None else [bos]) + text[begin:end].tolist()
            found.append((labelled_loss(model, ids, target), min(target, len(ids) - 1)))
            previous = end
            if end == len(text):
                break
    return found


def ours(model: GPT2LMHeadModel, name: str, texts: list[np.ndarray], bos: int | None) -> float:
    scorer, losses = Scorer(model), []
    for text in [np.concatenate(texts)] if PROTOCOLS[name].stream else texts:
        losses += protocol_losses(scorer, text, name, window=WINDOW, stride=STRIDE, bos=bos)
    return protocol_perplexity(name, losses)


@pytest.mark.parametrize("bos", [BOS, None])
def test_yarn_windowmean_and_token_weighted(model: GPT2LMHeadModel, texts: list[np.ndarray], bos: int | None) -> None:
    windows = yarn_window_losses(model, texts, bos)
    by_window = math.exp(sum(loss for loss, _ in windows) / len(windows))
    by_token = math.exp(sum(loss * count for loss, count in windows) / sum(count for _, count in windows))
    assert ours(model, "yarn_windowmean", texts, bos) == pytest.approx(by_window, rel=1e-5)
    assert ours(model, "token_weighted", texts, bos) == pytest.approx(by_token, rel=1e-5)
    assert by_window != pytest.approx(by_token, rel=1e-3)


def test_longlora_alltok_equals_the_papers_script(model: GPT2LMHeadModel, texts: list[np.ndarray]) -> None:
    data = np.concatenate(texts)
    starts = list(range(0, len(data) - WINDOW, STRIDE))
    starts.pop()
    losses = [labelled_loss(model, data[i : i + WINDOW].tolist(), WINDOW) for i in starts]
    wanted = 2.71828 ** (sum(losses) / len(losses))  # as the script has it
    assert ours(model, "longlora_alltok", texts, BOS) == pytest.approx(wanted, rel=1e-4)


def rolling_windows(tokens: list[int], prefix: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """Return (what is read before, what is predicted) of disjoint rolling windows, one context token at least."""
    found = [([prefix], tokens[:longest])]
    predicted = len(found[0][1])
    while predicted < len(tokens):
        count = min(len(tokens) - predicted, longest)
        end = predicted + count
        found.append((tokens[max(0, end - longest - 1) : end - count], tokens[end - count : end]))
        predicted = end
    return found


def test_rolling_windows_are_those_of_the_harness_own_test() -> None:
    windows = rolling_windows(list(range(34)), -100, 10)
    read = [[*before, *after][:-1] for before, after in windows]
    assert read == [[-100, *range(9)], list(range(9, 19)), list(range(19, 29)), list(range(23, 33))]
    assert [after for _, after in windows] == [
        list(range(10)),
        list(range(10, 20)),
        list(range(20, 30)),
        [30, 31, 32, 33],
    ]


def test_lmeval_disjoint_equals_the_harness_windows(model: GPT2LMHeadModel, texts: list[np.ndarray]) -> None:
    total, tokens = 0.0, 0
    for text in texts:
        for before, after in rolling_windows(text.tolist(), BOS, WINDOW):
            ids = torch.tensor([[*before, *after]])
            with torch.no_grad():
                log_p = model(ids[:, :-1]).logits.log_softmax(-1)[0, -len(after) :]
            total -= log_p.gather(-1, ids[0, -len(after) :, None]).sum().item()
            tokens += len(after)
    assert ours(model, "lmeval_disjoint", texts, BOS) == pytest.approx(math.exp(total / tokens), rel=1e-5)
    scorer = Scorer(model)
    losses = [
        part for text in texts for part in protocol_losses(scorer, text, "lmeval_disjoint", window=WINDOW, bos=BOS)
    ]
    by_word = protocol_perplexity("lmeval_disjoint", losses, units=20)
    assert by_word == pytest.approx(math.exp(total / 20), rel=1e-5)
    with pytest.raises(DataError, match="lmeval_disjoint reads a token before the text"):
        protocol_losses(scorer, texts[0], "lmeval_disjoint", window=WINDOW)


def test_hf_stride_equals_transformers_documented_loop(model: GPT2LMHeadModel, texts: list[np.ndarray]) -> None:
    data, nll_sum, n_tokens, previous = np.concatenate(texts), 0.0, 0, 0
    for begin in range(0, len(data), STRIDE):
        end = min(begin + WINDOW, len(data))
        target = end - previous
        loss = labelled_loss(model, data[begin:end].tolist(), target)
        nll_sum += loss * (target - 1)
        n_tokens += target - 1
        previous = end
        if end == len(data):
            break
    assert ours(model, "hf_stride", texts, BOS) == pytest.approx(math.exp(nll_sum / n_tokens), rel=1e-5)


def test_averages_of_arrays_worked_out_by_hand() -> None:
    windows = [np.array([1.0, 2.0, 3.0]), np.array([4.0, 6.0]), np.array([1.0, 1.0])]
    by_hand = {
        "yarn_windowmean": (2 + 5 + 1) / 3,
        "token_weighted": 18 / 7,
        "longlora_alltok": (2 + 5 + 1) / 3,
        "lmeval_disjoint": 18 / 7,
        "hf_stride": (3 * 2 + 1 * 5 + 1 * 1) / 5,
    }
    assert set(by_hand) == set(PROTOCOLS)
    for name, mean in by_hand.items():
        assert protocol_perplexity(name, windows) == pytest.approx(math.exp(mean))


def test_errors_say_what_is_wrong(model: GPT2LMHeadModel) -> None:
    with pytest.raises(UnknownNameError, match="unknown perplexity protocol 'yarn'"):
        protocol_perplexity("yarn", [np.ones(2)])
    with pytest.raises(DataError, match="needs the losses of at least one window"):
        protocol_perplexity("hf_stride", [])
    with pytest.raises(DataError, match="needs more than 20 tokens, got 20"):
        protocol_losses(Scorer(model), np.zeros(20, int), "longlora_alltok", window=WINDOW, stride=STRIDE)
