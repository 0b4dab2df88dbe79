"""How near an encoder's vectors stay to those of the base, by length."""

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

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class VectorScore:
    """How near vectors are at one length.

    Attributes:
        length: tokens that the model reads of each document, special ones included.
        base_reads: tokens that the base reads of it: no more than its window holds.
        documents: how many.
        cosine: mean cosine of the two vectors of a document.
        low: lower end of its 95 % interval, over documents; None: none holds.
        high: upper end.
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
        length: tokens that the model read of each.
        base_reads: tokens that the base read.
        cosines: one a document.
        seed: of the bootstrap.

    Example:
        >>> vector_score(128, 64, [0.5, 0.7]).cosine
        0.6
    """
    found = np.array(cosines, dtype=np.float64)
    interval = ratio_interval(found, np.ones(len(found)), seed=seed)
    low, high = (None, None) if interval is None else (max(-1.0, interval[0]), min(1.0, interval[1]))
    return VectorScore(length, base_reads, len(found), float(found.mean()), low, high)


def leading_tokens(document: Sequence[int] | np.ndarray, length: int, frame: tuple[list[int], list[int]]) -> list[int]:
    """Return the first tokens of `document` with the special ones around them, `length` in all.

    Raises:
        DataError: `length` tokens hold nothing beside the special ones.

    Example:
        >>> leading_tokens([5, 6, 7, 8], 4, ([1], [2]))
        [1, 5, 6, 2]
    """
    before, after = frame
    room = length - len(before) - len(after)
    if room < 1:
        raise DataError(f"a text of {length} tokens holds nothing beside the special ones.")
    return [*before, *map(int, document[:room]), *after]


def vector_cosine(model: PreTrainedModel, base: PreTrainedModel, whole: Sequence[int], leading: Sequence[int]) -> float:
    """Return the cosine of the model's vector of the tokens `whole` to the base's of `leading`.

    A vector is the mean of the last states over all tokens.

    Raises:
        DataError: the vectors are of different sizes.
        NumericError: one is not finite.
    """
    new, old = embed(model, [whole])[0], embed(base, [leading])[0]  # [E]
    if new.shape != old.shape:
        raise DataError(f"vectors of {len(new)} and of {len(old)} numbers cannot be held against each other.")
    return float(new @ old)


def near_the_base(
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[np.ndarray],
    lengths: Sequence[int],
) -> list[VectorScore]:
    """Return how near the vectors of `model` are to those of `base`, a score a length.

    The base reads as much of each document as its window holds, the model all of it, as `compare` has it.

    Args:
        model: an encoder, swapped or not.
        base: what it came from.
        tokenizer: of both.
        documents: token ids of each, without special ones; those that are shorter than the longest length are left
            out, so that all lengths rest on the same ones.
        lengths: tokens to read, special ones included.

    Raises:
        DataError: no document is as long as the longest length, or a length has no room for text.
        NumericError: a vector is not finite.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_posswap.training.tokenizer import byte_tokenizer
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
        raise DataError(f"no document has {longest} tokens, {around} special ones included.")
    limit = reach_of(base).limit
    scores = []
    for length in lengths:
        reads = length if limit is None else min(length, limit)
        pairs = [(leading_tokens(text, length, frame), leading_tokens(text, reads, frame)) for text in long]
        scores.append(vector_score(length, reads, [vector_cosine(model, base, *pair) for pair in pairs]))
    return scores
