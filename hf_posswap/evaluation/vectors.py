"""Cosine similarity of an encoder's vectors to those of the base, by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hf_posswap.errors import DataError
from hf_posswap.evaluation.frames import special_frame
from hf_posswap.evaluation.reach import reach_of
from hf_posswap.evaluation.retrieval import embed
from hf_posswap.evaluation.statistics import ratio_interval
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, repr=False)
class VectorScore(ResultView):
    """The similarity of vectors at one length.

    Attributes:
        length: tokens that the model reads of each document, including special ones.
        base_reads: tokens that the base reads of it, limited by its window.
        documents: number of documents.
        cosine: mean cosine of the two vectors of a document.
        low: lower end of its 95 % interval over documents, or None.
        high: upper end of the interval, or None.
    """

    length: int
    base_reads: int
    documents: int
    cosine: float
    low: float | None
    high: float | None


def vector_score(length: int, base_reads: int, cosines: Sequence[float], *, seed: int = 0) -> VectorScore:
    """Return the score of the cosines of all documents at one length.

    Args:
        length: tokens that the model reads of each document.
        base_reads: tokens that the base reads.
        cosines: one cosine per document.
        seed: random seed of the bootstrap.

    Example:
        >>> vector_score(128, 64, [0.5, 0.7]).cosine
        0.6
    """
    values = np.array(cosines, dtype=np.float64)
    interval = ratio_interval(values, np.ones(len(values)), seed=seed)
    low, high = (None, None) if interval is None else (max(-1.0, interval[0]), min(1.0, interval[1]))
    return VectorScore(length, base_reads, len(values), float(values.mean()), low, high)


def leading_tokens(document: Sequence[int] | np.ndarray, length: int, frame: tuple[list[int], list[int]]) -> list[int]:
    """Return the first tokens of `document` with the special tokens around them, `length` in total.

    Raises:
        DataError: `length` tokens have room only for special tokens.

    Example:
        >>> leading_tokens([5, 6, 7, 8], 4, ([1], [2]))
        [1, 5, 6, 2]
    """
    before, after = frame
    room = length - len(before) - len(after)
    if room < 1:
        raise DataError(f"a text of {length} tokens has room only for special tokens.")
    return [*before, *map(int, document[:room]), *after]


def vector_cosine(model: PreTrainedModel, base: PreTrainedModel, whole: Sequence[int], leading: Sequence[int]) -> float:
    """Return the cosine of the model's vector of `whole` and the base's vector of `leading`.

    A vector is the mean of the last hidden states over all tokens.

    Raises:
        DataError: the vectors have different sizes.
        NumericError: a vector is not finite.
    """
    new, old = embed(model, [whole])[0], embed(base, [leading])[0]  # [E]
    if new.shape != old.shape:
        raise DataError(f"vectors of {len(new)} and of {len(old)} numbers cannot be compared.")
    return float(new @ old)


def near_the_base(
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[np.ndarray],
    lengths: Sequence[int],
) -> list[VectorScore]:
    """Return the similarity of the vectors of `model` to those of `base`, one score per length.

    As in `compare`, the base reads as much of each document as fits its window, and the model reads all of it.

    Args:
        model: an encoder, swapped or not.
        base: the model before the swap.
        tokenizer: the tokenizer of both.
        documents: token ids of each document, without special ones; documents shorter than the longest length are
            dropped, so that all lengths use the same documents.
        lengths: tokens to read, including special ones.

    Raises:
        DataError: no document is as long as the longest length, or a length has no room for text.
        NumericError: a vector is not finite.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
        >>> model = BertModel(BertConfig(vocab_size=300, max_position_embeddings=8, **shape)).eval()
        >>> texts = [np.arange(start, start + 20) for start in (5, 50)]
        >>> for score in near_the_base(model, model, byte_tokenizer(), texts, [4, 8]):
        ...     print(score.length, score.base_reads, round(score.cosine, 4))
        4 4 1.0
        8 8 1.0
    """
    frame = special_frame(tokenizer)
    longest, around = max(lengths), sum(map(len, frame))
    long = [document for document in documents if len(document) + around >= longest]
    if not long:
        raise DataError(f"no document has {longest} tokens, including {around} special ones.")
    limit = reach_of(base).limit
    scores = []
    for length in lengths:
        reads = length if limit is None else min(length, limit)
        pairs = [(leading_tokens(text, length, frame), leading_tokens(text, reads, frame)) for text in long]
        scores.append(vector_score(length, reads, [vector_cosine(model, base, *pair) for pair in pairs]))
    return scores
