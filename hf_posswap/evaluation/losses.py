"""The losses of whole documents, read in full at every length or in sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_posswap.errors import DataError
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.evaluation.windows import Window, sliding_windows, window_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def sliding_document(scorer: Scorer, document: np.ndarray, window: int) -> np.ndarray:
    """Return the loss of each token of one document, float32 [L - 1], in half-overlapping windows of `window` tokens.

    The first window scores all its tokens, every other window only the tokens that no earlier window reached. This is
    the baseline on long text without a longer reach: each token beyond the first window is predicted from at least half
    a window and less than a whole one. No token is added before a window, and the assignment of tokens to windows does
    not depend on the document's length.

    Args:
        scorer: the scorer of a causal model.
        document: token ids [L].
        window: tokens, usually the original window.

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
    return np.concatenate(window_losses(scorer, document, _half_overlapping(len(document), window)))


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
