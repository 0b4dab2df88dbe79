"""Losses of windows of a text: the head runs only on scored tokens, and windows of equal shape form batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_posswap.errors import DataError
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.utils.result_views import ResultView


@dataclass(frozen=True, repr=False)
class Window(ResultView):
    """One forward over a span of a text.

    Attributes:
        start: index of the first token that it reads.
        stop: index after the last token that it predicts.
        scored: number of scored tokens at the end.
        reads_last: whether the last token is also read, not only predicted; None: the default of `Scorer.logits`.
    """

    start: int
    stop: int
    scored: int
    reads_last: bool | None = None


def window_losses(
    scorer: Scorer, tokens: np.ndarray, windows: Sequence[Window], *, bos: int | None = None, batch_tokens: int = 2048
) -> list[np.ndarray]:
    """Return the losses of the scored tokens of each window, float32 [scored], in the order of the windows.

    Args:
        scorer: the model's scorer.
        tokens: token ids of one text, [L].
        windows: windows within the text; each must read at least one token before its first scored one.
        bos: a token to read before every window, or None.
        batch_tokens: maximum tokens of a batch; consecutive windows of equal shape form a batch.

    Raises:
        DataError: a window exceeds the text, or scores a token without context.
        NumericError: a loss is not finite.
        PositionRangeError: the model's position table ends before a window does.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> windows = [Window(0, 8, 7), Window(4, 12, 4)]
        >>> [len(losses) for losses in window_losses(Scorer(model), np.ones(12, int), windows)]
        [7, 4]
    """
    for window in windows:
        room = window.stop - window.start - (bos is None)
        if not (0 <= window.start < window.stop <= len(tokens) and 1 <= window.scored <= room):
            raise DataError(f"{window} does not fit a text of {len(tokens)} tokens, read {_with(bos)}.")
    losses = []
    for batch in _batches(windows, batch_tokens):
        rows = np.stack([tokens[window.start : window.stop] for window in batch]).astype(np.int64)
        if bos is not None:
            rows = np.concatenate([np.full((len(rows), 1), bos), rows], axis=1)
        losses += list(
            scorer.nll(torch.from_numpy(rows), scored=batch[0].scored, reads_last=batch[0].reads_last).numpy()
        )
    return losses


def sliding_windows(length: int, window: int, stride: int) -> list[Window]:
    """Return windows of up to `window` tokens, `stride` apart, each scoring the tokens that no earlier window scored.

    The last window is truncated at the end of the text. The first token of the text is not scored.

    Raises:
        DataError: the stride is not between 1 and the window, or the text is shorter than 2 tokens.

    Example:
        >>> [(window.start, window.stop, window.scored) for window in sliding_windows(10, window=6, stride=3)]
        [(0, 6, 5), (3, 9, 3), (6, 10, 1)]
    """
    if not 1 <= stride <= window or window < 2 or length < 2:
        raise DataError(
            f"sliding windows need 1 <= stride <= window and a text of 2 tokens or more, got stride {stride}, window "
            f"{window}, length {length}."
        )
    windows, done = [], 1
    for start in range(0, length, stride):
        stop = min(start + window, length)
        windows.append(Window(start, stop, stop - done))
        done = stop
        if stop == length:
            break
    return windows


def _batches(windows: Sequence[Window], batch_tokens: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in windows:
        size = window.stop - window.start
        same = batch and _shape(window) == _shape(batch[0])
        if batch and not (same and (len(batch) + 1) * size <= batch_tokens):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _shape(window: Window) -> tuple[int, int, bool | None]:
    return window.stop - window.start, window.scored, window.reads_last


def _with(bos: int | None) -> str:
    return "without a token before it" if bos is None else f"with token {bos} before it"
