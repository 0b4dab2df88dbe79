"""Perplexity by the protocols of papers and tools, for comparison with their numbers. Metric `ppl_compat`.

Numbers of different protocols cannot be compared: they differ in the windows, in the scored tokens, in the weights, and
in the token before a window. Each protocol here defines how to cut a text into windows and how to average their losses.

| protocol | windows | average | before a window |
|---|---|---|---|
| yarn_windowmean | sliding, only new tokens scored | exp of the mean of window means | BOS, counted in the window |
| token_weighted | the same | exp of the mean over tokens | the same |
| longlora_alltok | one stream, sliding, all tokens scored | exp of the mean of window means | nothing |
| lmeval_disjoint | disjoint, the last one extended to the left | exp of the sum over words or tokens | BOS, at first |
| hf_stride | sliding, only new tokens scored | window means weighted by labels minus one | nothing |

Sources: jquesnelle/yarn eval/perplexity.py; PoSE eval_ppl.py; dvlab-research/LongLoRA eval.py; EleutherAI
lm-evaluation-harness `loglikelihood_rolling`; https://huggingface.co/docs/transformers/perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_posswap.errors import DataError, UnknownNameError
from hf_posswap.evaluation.losses import Window, sliding_windows, window_losses
from hf_posswap.evaluation.scoring import Scorer

Losses = Sequence[np.ndarray]


@dataclass(frozen=True)
class Protocol:
    """A protocol to measure perplexity.

    Attributes:
        name: shown in results.
        stream: whether documents are joined into one text first.
        takes_bos: whether the BOS token, if the tokenizer has one, is read before the windows.
        cut: computes the windows of a text from its length, the window length, the stride, and whether BOS is read.
        average: computes the perplexity from the losses of all windows of all texts, in order, and the number of units
            to divide by (None: the scored tokens).
    """

    name: str
    stream: bool
    takes_bos: bool
    cut: Callable[[int, int, int, bool], list[Window]]
    average: Callable[[Losses, int | None], float]


def _yarn_windows(length: int, window: int, stride: int, bos: bool) -> list[Window]:
    windows = sliding_windows(length, window - bos, stride)
    first = windows[0]
    return [Window(first.start, first.stop, first.scored + bos), *windows[1:]]


def _all_tokens(length: int, window: int, stride: int, bos: bool) -> list[Window]:
    starts = list(range(0, length - window, stride))[:-1]  # the original also skips the last full window
    if not starts:
        raise DataError(f"longlora_alltok needs more than {window + stride} tokens, got {length}.")
    return [Window(start, start + window, window - 1) for start in starts]


def _disjoint(length: int, window: int, stride: int, bos: bool) -> list[Window]:
    """The text begins with BOS; a window reads `window` tokens and predicts the successor of each."""
    stops = [*range(window, length - 1, window), length - 1]
    starts = [0, *stops[:-1]]
    return [
        Window(max(0, stop - window), stop + 1, stop - start, reads_last=False)
        for start, stop in zip(starts, stops, strict=True)
    ]


def _mean_of_means(losses: Losses, units: int | None) -> float:
    return math.exp(np.mean([window.mean(dtype=np.float64) for window in losses]))


def _token_mean(losses: Losses, units: int | None) -> float:
    return math.exp(np.concatenate(losses).sum(dtype=np.float64) / (units or sum(map(len, losses))))


def _labels_less_one(losses: Losses, units: int | None) -> float:
    # the first window has one more label than scored tokens: its first token is not predicted
    weights = [len(window) - (index > 0) for index, window in enumerate(losses)]
    means = [window.mean(dtype=np.float64) for window in losses]
    return math.exp(np.dot(weights, means) / sum(weights))


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol("yarn_windowmean", False, True, _yarn_windows, _mean_of_means),
        Protocol("token_weighted", False, True, _yarn_windows, _token_mean),
        Protocol("longlora_alltok", True, False, _all_tokens, _mean_of_means),
        Protocol("lmeval_disjoint", False, True, _disjoint, _token_mean),
        Protocol(
            "hf_stride",
            True,
            False,
            lambda length, window, stride, bos: sliding_windows(length, window, stride),
            _labels_less_one,
        ),
    )
}


def protocol_of(name: str) -> Protocol:
    """Return the protocol called `name`.

    Raises:
        UnknownNameError: there is no such protocol.

    Example:
        >>> protocol_of("hf_stride").stream
        True
    """
    if name not in PROTOCOLS:
        raise UnknownNameError("perplexity protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def protocol_losses(
    scorer: Scorer, text: np.ndarray, protocol: str, *, window: int, stride: int = 256, bos: int | None = None
) -> list[np.ndarray]:
    """Return the losses of the scored tokens of each window of one text, float32, as `protocol` cuts it.

    Args:
        scorer: the model's scorer.
        text: token ids [L] without BOS: one document, or the stream of all documents, depending on the protocol.
        protocol: name of the protocol.
        window: tokens of a window, including BOS.
        stride: stride of sliding windows.
        bos: the tokenizer's BOS token, or None. `lmeval_disjoint` needs one.

    Raises:
        DataError: the text is too short, the stride does not fit, or a token is missing before the first window.
        UnknownNameError: no such protocol.
        NumericError, PositionRangeError: as `Scorer.nll`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> losses = protocol_losses(Scorer(model), np.ones(20, int), "lmeval_disjoint", window=8, bos=3)
        >>> [len(part) for part in losses]
        [8, 8, 4]
    """
    chosen = protocol_of(protocol)
    before = bos if chosen.takes_bos else None
    if protocol == "lmeval_disjoint":
        if bos is None:
            raise DataError("lmeval_disjoint reads a token before the text: give bos, or the end-of-text token.")
        text, before = np.concatenate([[bos], text]), None
    return window_losses(scorer, text, chosen.cut(len(text), window, stride, before is not None), bos=before)


def protocol_perplexity(protocol: str, losses: Losses, *, units: int | None = None) -> float:
    """Return the perplexity from the losses of all windows of `protocol`.

    Args:
        protocol: name of the protocol.
        losses: losses of the windows of all texts, in order.
        units: the divisor of the sum for `lmeval_disjoint`: words (word_perplexity) or bytes; None: tokens.

    Raises:
        DataError: there are no losses.
        UnknownNameError: no such protocol.

    Example:
        >>> halves = [np.log([2.0, 2.0, 2.0]), np.log([8.0])]
        >>> [round(protocol_perplexity(name, halves), 6) for name in ("yarn_windowmean", "token_weighted")]
        [4.0, 2.828427]
    """
    if not losses:
        raise DataError(f"{protocol} needs the losses of at least one window.")
    return protocol_of(protocol).average(losses, units)
