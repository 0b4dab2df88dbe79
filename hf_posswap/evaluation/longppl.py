"""Perplexity over the tokens that need far context. Metric `longppl`.

Key tokens are those that an evaluator model predicts well, and much better from the whole text than from a short part
of it: loss_short - loss_full > 2 and loss_full < 2 nats. LongPPL is exp of the mean loss of the measured model over
them. Fang et al. 2024, https://arxiv.org/abs/2410.23771, equations 3 to 5.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from hf_posswap.errors import DataError
from hf_posswap.evaluation.losses import sliding_windows, window_losses
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.utils.atomic_io import read_json, write_json
from hf_posswap.utils.result_views import FactsView

SPANS_VERSION = 1
_FIELDS = {"version", "evaluator", "short", "stride", "gain", "limit", "documents", "spans"}


@dataclass(frozen=True, repr=False)
class KeySpans(FactsView):
    """The key tokens of some documents.

    Attributes:
        evaluator: name of the model that selects them.
        short: tokens of its short context.
        stride: stride of its short windows.
        gain: minimum gain from the whole text, in nats.
        limit: upper bound of the loss with the whole text, in nats.
        documents: a digest of each document's tokens.
        spans: [start, stop) pairs of token indices for each document.
    """

    evaluator: str
    short: int
    stride: int
    gain: float
    limit: float
    documents: tuple[str, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]

    def _repr_facts(self) -> dict[str, object]:
        count = sum(map(len, self.spans))
        names = ("evaluator", "short", "stride", "gain", "limit")
        return {name: getattr(self, name) for name in names} | {"documents": len(self.documents), "spans": count}

    def masks(self, documents: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return for each document a mask of its key tokens without the first token, bool [L - 1].

        Raises:
            DataError: the documents or the tokenizer differ from those of the spans.
        """
        if tuple(map(_digest, documents)) != self.documents:
            raise DataError(
                f"the key spans of evaluator {self.evaluator!r} belong to {len(self.documents)} other documents, or to "
                "the same ones in other tokens: find them again."
            )
        masks = []
        for document, spans in zip(documents, self.spans, strict=True):
            mask = np.zeros(len(document), dtype=bool)
            for start, stop in spans:
                mask[start:stop] = True
            masks.append(mask[1:])
        return masks

    def save(self, path: Path) -> None:
        """Write the spans as JSON.

        Raises:
            CheckpointError: the file cannot be written.
        """
        write_json(path, {"version": SPANS_VERSION} | asdict(self))

    @classmethod
    def load(cls, path: Path) -> KeySpans:
        """Read spans written by `save`.

        Raises:
            CheckpointError: there is no such file, or it is not JSON.
            DataError: the file holds something else, or was edited.
        """
        data = read_json(path, 2**28)
        if not isinstance(data, dict) or set(data) != _FIELDS or data["version"] != SPANS_VERSION:
            raise DataError(f"{path} holds no key spans of version {SPANS_VERSION}: find them again.")
        try:
            spans = tuple(tuple((start, stop) for start, stop in document) for document in data["spans"])
            documents = tuple(data["documents"])
        except (TypeError, ValueError) as error:
            raise DataError(f"{path} holds key spans that cannot be read ({error}): find them again.") from error
        good = all(type(a) is type(b) is int and 0 <= a < b for document in spans for a, b in document)
        if not good or len(spans) != len(documents) or not all(isinstance(name, str) for name in documents):
            raise DataError(
                f"{path} holds invalid spans of token indices, or spans of other documents: find them again."
            )
        plain = {name: data[name] for name in ("evaluator", "short", "stride", "gain", "limit")}
        return cls(**plain, documents=documents, spans=spans)


def find_key_spans(
    evaluator: Scorer,
    name: str,
    documents: Sequence[np.ndarray],
    *,
    short: int = 4096,
    stride: int = 1024,
    gain: float = 2.0,
    limit: float = 2.0,
) -> KeySpans:
    """Return the key tokens of `documents` under an evaluator.

    Args:
        evaluator: scorer of a model that uses long context well.
        name: name of the evaluator, stored with the spans.
        documents: token ids [L] each, longer than `short`.
        short: tokens of the short context, including the scored ones.
        stride: tokens scored by each short window.
        gain: minimum gain from the whole text, in nats.
        limit: upper bound of the loss with the whole text, in nats.

    Raises:
        DataError: a document does not exceed the short context, or the stride does not fit.
        NumericError, PositionRangeError: as `Scorer.nll`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> find_key_spans(Scorer(model), "tiny", [np.ones(8, int)], short=4, stride=2).spans
        ((),)
    """
    shortest = min(map(len, documents), default=0)
    if shortest <= short:
        raise DataError(f"key tokens need documents longer than the short context of {short}, got one of {shortest}.")
    spans = []
    for document in documents:
        whole = evaluator.nll(torch.from_numpy(document.astype(np.int64))[None])[0].numpy()  # [L - 1]
        short_losses = window_losses(evaluator, document, sliding_windows(len(document), short, stride))
        is_key = (np.concatenate(short_losses) - whole > gain) & (whole < limit)
        from_second = [0, 0]  # the first token has no loss
        edges = np.flatnonzero(np.diff(np.concatenate([from_second, is_key.astype(int), [0]])))
        spans.append(tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2)))
    digests = tuple(map(_digest, documents))
    return KeySpans(name, short, stride, gain, limit, digests, tuple(spans))


def long_perplexity(losses: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> tuple[float, int]:
    """Return LongPPL and the number of its key tokens.

    Args:
        losses: losses of the measured model, [L - 1] for each document, in nats.
        masks: from `KeySpans.masks`, of the same shapes.

    Raises:
        DataError: there are no key tokens, or the shapes differ.

    Example:
        >>> long_perplexity([np.log([2.0, 9.0, 8.0])], [np.array([True, False, True])])
        (4.0, 2)
    """
    if [nll.shape for nll in losses] != [mask.shape for mask in masks]:
        raise DataError("LongPPL needs a mask of the same shape for the losses of each document.")
    count = sum(int(mask.sum()) for mask in masks)
    if count == 0:
        raise DataError("LongPPL needs key tokens, and the evaluator found none: longer documents may have some.")
    total = sum(float(nll[mask].sum(dtype=np.float64)) for nll, mask in zip(losses, masks, strict=True))
    return math.exp(total / count), count


def _digest(document: np.ndarray) -> str:
    return hashlib.sha256(document.astype("<i8").tobytes()).hexdigest()[:16]
