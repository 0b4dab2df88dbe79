"""The losses of whole documents, read in full at every length or in sliding windows.

Of windows the head runs only on scored tokens, and windows of equal shape form batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_posswap.errors import DataError
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
            before = "without a token before it" if bos is None else f"with token {bos} before it"
            raise DataError(f"{window} does not fit a text of {len(tokens)} tokens, read {before}.")
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


def measure_losses(
    model: PreTrainedModel,
    documents: np.ndarray,
    lengths: Sequence[int],
    *,
    one_pass: bool,
    on_document: Callable[[int, float], None] | None = None,
    chunk: int = 512,
    prefill: int | None = None,
) -> dict[int, np.ndarray]:
    """Return the loss of each token at each length, {L: float32 [N, L - 1]}.

    Args:
        model: a causal model.
        documents: token ids [N, at least the longest length].
        lengths: numbers of tokens to read of each document, all within what the model can run.
        one_pass: whether the forward of the longest length also gives the losses of shorter lengths, which is true if a
            token's logits do not depend on the total length.
        on_document: called after each forward with its tokens and its mean loss.
        chunk: as in `Scorer`.
        prefill: as in `Scorer`.

    Raises:
        DataError: there is no length, or documents are shorter than a length.
        PositionRangeError: a length exceeds the model's position table.
        NumericError: a loss is not finite.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> {n: a.shape for n, a in measure_losses(model, np.ones((3, 8), int), [4, 8], one_pass=True).items()}
        {4: (3, 3), 8: (3, 7)}
    """
    readable = documents.ndim == 2 and len(documents) > 0 and len(lengths) > 0
    if not readable or not 2 <= min(lengths) <= max(lengths) <= documents.shape[1]:
        raise DataError(f"lengths {list(lengths)} cannot be read of documents [count, tokens] {documents.shape}.")
    scorer = Scorer(model, chunk, prefill=prefill)
    run_lengths = [max(lengths)] if one_pass else sorted(set(lengths))
    measured = {}
    for length in run_lengths:
        rows = []
        for document in documents:
            losses = scorer.nll(torch.from_numpy(document[None, :length].astype(np.int64)))[0].numpy()
            rows.append(losses)
            if on_document is not None:
                on_document(length, float(losses.mean()))
        measured[length] = np.stack(rows)
    longest = measured[run_lengths[-1]]
    return {length: measured.get(length, longest[:, : length - 1]) for length in sorted(set(lengths))}


def sliding_losses(
    model: PreTrainedModel,
    documents: np.ndarray,
    window: int,
    *,
    on_document: Callable[[int, float], None] | None = None,
    chunk: int = 512,
) -> np.ndarray:
    """Return the loss of each token, float32 [N, L - 1], in windows of at most `window` tokens.

    It applies `sliding_document` to each document.

    Args:
        model: a causal model.
        documents: token ids [N, L].
        window: tokens of a window.
        on_document: called after each document with its forward tokens and its mean loss.
        chunk: as in `Scorer`.

    Raises:
        DataError, NumericError, PositionRangeError: as `sliding_document`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> sliding_losses(model, np.ones((3, 32), int), window=8).shape
        (3, 31)
    """
    if documents.ndim != 2 or len(documents) == 0:
        raise DataError(f"documents are token ids [N, L], at least one of them, got shape {documents.shape}.")
    scorer, rows = Scorer(model, chunk), []
    for document in documents:
        rows.append(sliding_document(scorer, document, window))
        if on_document is not None:
            on_document(sum(sliding_reads(len(document), window)), float(rows[-1].mean()))
    return np.stack(rows)


def sliding_document(scorer: Scorer, document: np.ndarray, window: int, first: np.ndarray | None = None) -> np.ndarray:
    """Return the loss of each token of one document, float32 [L - 1], in half-overlapping windows of `window` tokens.

    The first window scores all its tokens, every other window only the tokens that no earlier window reached. This is
    the baseline on long text without a longer reach: each token beyond the first window is predicted from at least half
    a window and less than a whole one. No token is added before a window, and the assignment of tokens to windows does
    not depend on the document's length.

    Args:
        scorer: the scorer of a causal model.
        document: token ids [L].
        window: tokens, usually the original window.
        first: the losses of the first window [window - 1], where they are known; None: it is read.

    Raises:
        DataError: the window or the document has fewer than 2 tokens.
        NumericError: a loss is not finite.
        PositionRangeError: the window exceeds the model's position table.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> sliding_document(Scorer(model), np.ones(13, int), window=8).shape
        (12,)
    """
    windows = _half_overlapping(len(document), window)
    known = [] if first is None else [first]
    return np.concatenate([*known, *window_losses(scorer, document, windows[len(known) :])])


def sliding_reads(length: int, window: int) -> list[int]:
    """Return the tokens of each forward of `sliding_document`.

    Example:
        >>> sliding_reads(13, 8)
        [8, 8, 5]
    """
    return [span.stop - span.start for span in _half_overlapping(length, window)]


def _half_overlapping(length: int, window: int) -> list[Window]:
    if window < 2:
        raise DataError(f"a sliding window holds at least 2 tokens, got {window}.")
    return sliding_windows(length, window, window // 2)
