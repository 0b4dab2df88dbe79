"""The losses of whole documents: read in full at every length, or a window at a time."""

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
        lengths: to read of each document, all within what the model can run.
        one_pass: whether the forward of the longest length gives the losses of the shorter ones too, which holds where
            a token's logits do not depend on the total length.
        on_document: called after each forward with its tokens and its mean loss.
        chunk: as in `Scorer`.
        prefill: as in `Scorer`.

    Raises:
        DataError: documents shorter than a length, or no length.
        PositionRangeError: a length the model's position table does not reach.
        NumericError: a loss that is not finite.

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
    run = [max(lengths)] if one_pass else sorted(set(lengths))
    measured = {}
    for length in run:
        rows = []
        for document in documents:
            losses = scorer.nll(torch.from_numpy(document[None, :length].astype(np.int64)))[0].numpy()
            rows.append(losses)
            if on_document is not None:
                on_document(length, float(losses.mean()))
        measured[length] = np.stack(rows)
    longest = measured[run[-1]]
    return {length: measured.get(length, longest[:, : length - 1]) for length in sorted(set(lengths))}


def sliding_losses(
    model: PreTrainedModel,
    documents: np.ndarray,
    window: int,
    *,
    on_document: Callable[[int, float], None] | None = None,
    chunk: int = 512,
) -> np.ndarray:
    """Return the loss of each token, float32 [N, L - 1], where the model never reads more than `window` tokens.

    As `sliding_document`, for each document.

    Args:
        model: a causal model.
        documents: token ids [N, L].
        window: tokens.
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

    Of the first window all tokens are scored, of every other what the ones before did not reach. It is what a model can
    do on long text without any reach: each token beyond the first window is predicted from at least half a window and
    never from a whole one. Nothing stands before a window; the cut of the document moves no token to another window.

    Args:
        scorer: of a causal model.
        document: token ids [L].
        window: tokens, usually the original window.

    Raises:
        DataError: the window is below 2 tokens, or the document is.
        NumericError: a loss that is not finite.
        PositionRangeError: the window is longer than the model's position table.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> sliding_document(Scorer(model), np.ones(13, int), window=8).shape
        (12,)
    """
    return np.concatenate(window_losses(scorer, document, _halves(len(document), window)))


def sliding_reads(length: int, window: int) -> list[int]:
    """Return the tokens of each forward of `sliding_document`.

    Example:
        >>> sliding_reads(13, 8)
        [8, 8, 5]
    """
    return [one.stop - one.start for one in _halves(length, window)]


def _halves(length: int, window: int) -> list[Window]:
    if window < 2:
        raise DataError(f"a sliding window holds at least 2 tokens, got {window}.")
    return sliding_windows(length, window, window // 2)
