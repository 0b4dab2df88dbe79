"""Windows cover every token once, and their losses are those of a loop over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap.errors import DataError
from hf_posswap.evaluation import Scorer
from hf_posswap.evaluation.losses import Window, sliding_windows, window_losses


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


@given(st.integers(2, 200), st.integers(2, 40), st.integers(1, 40))
def test_each_token_but_the_first_is_scored_once(length: int, window: int, stride: int) -> None:
    stride = min(stride, window)
    windows = sliding_windows(length, window, stride)
    scored = [t for w in windows for t in range(w.stop - w.scored, w.stop)]
    assert scored == list(range(1, length))
    assert all(w.stop - w.start <= window and w.start % stride == 0 for w in windows)
    assert all(w.stop - w.start == window for w in windows[:-1])


@pytest.mark.parametrize("bos", [None, 7])
@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
def test_batches_do_not_change_losses(model: GPT2LMHeadModel, bos: int | None, batch_tokens: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 61)
    windows = [*sliding_windows(61, 12, 5), Window(3, 9, 2), Window(30, 36, 2)]
    found = window_losses(Scorer(model), tokens, windows, bos=bos, batch_tokens=batch_tokens)
    for window, losses in zip(windows, found, strict=True):
        read = [] if bos is None else [bos]
        ids = torch.tensor([*read, *tokens[window.start : window.stop].tolist()])
        with torch.no_grad():
            own = functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        np.testing.assert_allclose(losses, own[-window.scored :].numpy(), atol=1e-5)


@pytest.mark.parametrize("window", [Window(0, 8, 8), Window(4, 4, 0), Window(-1, 4, 2), Window(0, 62, 3)])
def test_windows_that_do_not_fit_are_refused(model: GPT2LMHeadModel, window: Window) -> None:
    with pytest.raises(DataError, match="does not fit a text of 61 tokens, read without a token before it"):
        window_losses(Scorer(model), np.zeros(61, int), [window])


@pytest.mark.parametrize(("length", "window", "stride"), [(10, 4, 0), (10, 4, 5), (1, 4, 2), (10, 1, 1)])
def test_slides_that_skip_tokens_are_refused(length: int, window: int, stride: int) -> None:
    with pytest.raises(DataError, match="1 <= stride <= window"):
        sliding_windows(length, window, stride)
