"""Losses of documents in the window and beyond it, and differences between two models, paired by document.

Each document gives the same number of pieces of the longest length. The unit is the document, because its pieces are
not independent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posswap.comparison import EvalDocuments
from hf_posswap.comparison.candidates import fingerprint
from hf_posswap.evaluation import (
    RunStore,
    embed,
    mask_groups,
    masked_losses,
    measure_losses,
    non_inferiority,
    paired_change,
    ratio_interval,
    reach_of,
    sliding_losses,
)
from hf_posswap.evaluation.masked import special_frame

MULTIPLES = (1, 2, 4, 8)
WINDOW, LAST, LAST_ALONE = "window", "last window", "last window alone"
MARGIN = 0.02
"""Nats a token that a recipe may lose in the window."""
INTERVALS = "the farther of Student's t and the bootstrap-t at each end"
"""The current method for intervals over documents; results record their own."""
_GROUPS = 2
"""Groups of masked tokens that are read, of the seven groups of 15 % that would mask each token once."""

Means = dict[str, np.ndarray]
"""Mean loss of each document, float64 [N], by what was read: "window", "1", "2", ..."""


@dataclass(frozen=True)
class Texts:
    """What models are measured on.

    Attributes:
        documents: tokens [N, pieces x the longest length].
        window: of the unswapped model.
        tokenizer: of the models.
        multiples: lengths to read of each piece, in windows, ascending.
    """

    documents: EvalDocuments
    window: int
    tokenizer: Any
    multiples: tuple[int, ...] = MULTIPLES

    @property
    def longest(self) -> int:
        """Tokens of a piece."""
        return self.window * self.multiples[-1]

    def cut(self, length: int) -> np.ndarray:
        """Return the documents in rows of `length` tokens, those of one document after another, [rows, length]."""
        return self.documents.tokens.reshape(-1, length)

    def to_dict(self) -> dict[str, Any]:
        """Return the description of the texts for results."""
        fields = self.documents.to_dict()
        pieces = self.documents.tokens.shape[1] // self.longest
        return {key: fields[key] for key in ("source", "documents", "digest")} | {
            "pieces of a document": pieces,
            "tokens of a piece": self.longest,
            "window": self.window,
        }


def document_means(model: Any, texts: Texts, store: RunStore, teacher: Any = None) -> Means:
    """Return what `model` loses on each document, measured now or found in `store`.

    "window": all windows of the original length, each read by itself. "1", "2", "4", "8": the first so many windows of
    each piece, as far as the model runs. "last window": the tokens of the last window of each piece, read after all
    before them; "last window alone": the same tokens in a window of their own.

    Args:
        model: a causal model (next-token loss), or an encoder (loss of masked tokens).
        texts: to read.
        store: of what was measured.
        teacher: the unswapped encoder; then 1 less the cosine of the pooled states of both is measured. Of a text that
            is longer than its window it gives the mean over windows.
    """
    named = {
        "what": "means of documents",
        "model": fingerprint(model),
        "texts": texts.to_dict(),
        "multiples": list(texts.multiples),
        "pieces": list(texts.documents.tokens.shape),
    }
    if teacher is not None:
        named["teacher"] = fingerprint(teacher)

    def measure() -> dict[str, Any]:
        if teacher is not None:
            means = _embedded(model, teacher, texts)
        else:
            means = (_causal if reach_of(model).causal else _masked)(model, texts)
        return {key: row.tolist() for key, row in means.items()}

    stored_means = store.value(named, measure)
    assert isinstance(stored_means, dict)
    return {key: np.array(row) for key, row in stored_means.items()}


def _causal(model: Any, texts: Texts) -> Means:
    reach, window, count = reach_of(model), texts.window, len(texts.documents.names)
    pieces = texts.cut(texts.longest)
    alone = measure_losses(model, texts.cut(window), [window], one_pass=True)[window]  # [N P M, W - 1]
    lengths = [window * m for m in texts.multiples if reach.limit is None or window * m <= reach.limit]
    by_length = measure_losses(model, pieces, lengths, one_pass=reach.prefix_consistent)  # [N P, L - 1]
    means = {WINDOW: _by_document(alone, count)}
    means |= {str(length // window): _by_document(losses, count) for length, losses in by_length.items()}
    if texts.longest in by_length and len(texts.multiples) > 1:
        means[LAST] = _by_document(by_length[texts.longest][:, 1 - window :], count)
        means[LAST_ALONE] = _by_document(alone.reshape(len(pieces), -1, window - 1)[:, -1], count)
    return means


def sliding_means(model: Any, texts: Texts, store: RunStore) -> np.ndarray:
    """Return the mean loss of each document, float64 [N], where the model reads its pieces by half-overlapping windows.

    The baseline for long text: at most a window of the original length at once, over the same tokens as the longest
    of `document_means`.

    Args:
        model: a causal model.
        texts: to read, with an even window.
        store: of what was measured.
    """
    named = {
        "what": "means of documents by a sliding window",
        "model": fingerprint(model),
        "texts": texts.to_dict(),
        "pieces": list(texts.documents.tokens.shape),
    }

    def measure() -> np.ndarray:
        losses = sliding_losses(model, texts.cut(texts.longest), texts.window)  # [N P, L - 1]
        return _by_document(losses, len(texts.documents.names))

    return np.asarray(store.value(named, measure))


def _masked(model: Any, texts: Texts) -> Means:
    return _by_length(lambda rows: _masked_rows(model, texts, rows), model, texts)


def _embedded(model: Any, teacher: Any, texts: Texts) -> Means:
    before, after = special_frame(texts.tokenizer)

    def vectors(encoder: Any, rows: np.ndarray) -> np.ndarray:
        return embed(encoder, [[*before, *row, *after] for row in rows.tolist()]).double().numpy()  # [rows, E]

    def distances(rows: np.ndarray) -> np.ndarray:
        # pieces of the teacher's window, shortened by the special tokens
        piece_count = -(-rows.shape[1] // texts.window)
        pieces = [rows[:, i * texts.window : (i + 1) * texts.window] for i in range(piece_count)]
        inside = texts.window - len(before) - len(after)
        wanted = sum(vectors(teacher, piece[:, :inside]) for piece in pieces)
        wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
        return 1 - (vectors(model, rows) * wanted).sum(axis=1)[:, None]  # [rows, 1]

    return _by_length(distances, model, texts)


def _by_length(losses: Callable[[np.ndarray], np.ndarray], model: Any, texts: Texts) -> Means:
    """Return document means of `losses` at each length, which includes an encoder's special tokens."""
    reach, window, count = reach_of(model), texts.window, len(texts.documents.names)
    frame = sum(map(len, special_frame(texts.tokenizer)))
    means = {WINDOW: _by_document(losses(texts.cut(window)[:, : window - frame]), count)}
    for multiple in texts.multiples:
        length = window * multiple
        if reach.limit is None or length <= reach.limit:
            means[str(multiple)] = _by_document(losses(texts.cut(texts.longest)[:, : length - frame]), count)
    return means


def _masked_rows(model: Any, texts: Texts, rows: np.ndarray) -> np.ndarray:
    """Return the losses of the masked tokens of each row, [rows, masked], the same tokens in each row."""
    groups = mask_groups(rows.shape[1])[:_GROUPS]
    masked_indices = np.sort(np.concatenate(groups))
    return np.stack([masked_losses(model, texts.tokenizer, row, groups)[masked_indices] for row in rows])


def _by_document(losses: np.ndarray, count: int) -> np.ndarray:
    """Return the mean of each document, [N], of losses of its rows, [N rows, tokens]."""
    return losses.astype(np.float64).reshape(count, -1).mean(axis=1)


def intervals_said(result: Mapping[str, Any]) -> str:
    """Return how the intervals of `result` were computed.

    Example:
        >>> intervals_said({"intervals": INTERVALS})
        "Intervals of 95 % over documents: the farther of Student's t and the bootstrap-t at each end."
    """
    return f"Intervals of 95 % over documents: {result['intervals']}."


def mean_with_interval(means: np.ndarray) -> dict[str, float | None]:
    """Return the mean over documents and its 95 % interval, or None if there is no valid interval."""
    low, high = ratio_interval(means, np.ones(len(means))) or (None, None)
    return {"nll": float(means.mean()), "low": low, "high": high}


def difference(before: np.ndarray, after: np.ndarray, margin: float = MARGIN) -> dict[str, Any]:
    """Return `after` less `before`, paired by document: interval, verdict on `margin`, and difference per document.

    Args:
        before: means of documents, [N].
        after: of the same tokens, [N].
        margin: most nats a token that the upper end of the 95 % interval may reach.

    Example:
        >>> change = difference(np.arange(8.0), np.arange(8.0) + 0.5, 0.02)
        >>> change["difference"], change["verdict"]
        (0.5, 'worse')
    """
    ones = np.ones(len(before))
    bounds, change = non_inferiority(before, after, ones, margin=margin), paired_change(before, after, ones)
    both = dataclasses.asdict(bounds) | {"low": change.low, "high": change.high, "p": change.p}
    both["by_document"] = (after - before).tolist()
    return {key: value for key, value in both.items() if key != "lower"}


def is_below(change: Mapping[str, Any], bound: float, key: str = "upper") -> bool:
    """Return whether the whole interval of a difference is below `bound`; False without an interval."""
    return change[key] is not None and bool(change[key] < bound)
