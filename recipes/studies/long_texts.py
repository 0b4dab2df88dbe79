"""Long texts and what is asked of them: passkeys in filler, and passages taken out of real text.

A document is asked several questions, one of each equal part of it, so that a reader who stops at an eighth of the text
can answer one of eight. Its answer is the document: the text of the question stands in it alone, or was cut from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posswap.errors import DataError
from hf_posswap.evaluation.frames import special_frame
from hf_posswap.evaluation.retrieval import FILLER, retrieval_texts

PASSAGE = 32
"""Tokens of a passage that is taken out."""
NEAREST = 10
"""Of the documents by nearness: those that count for nDCG."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        tokens: with the special ones around them.
        document: number of the one that answers it.
        place: tokens of that document before the answer.
    """

    tokens: tuple[int, ...]
    document: int
    place: int


@dataclass(frozen=True)
class Task:
    """Documents of one length, special tokens included, and the questions, as many of each document, in its order."""

    name: str
    length: int
    documents: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]


def passkeys(tokenizer: Any, length: int, documents: int, questions: int, seed: int = 0) -> Task:
    """Return documents of filler that each hold the pass keys of some names, by which they are asked for.

    Args:
        tokenizer: of the models.
        length: tokens of a document.
        documents: how many.
        questions: of each.
        seed: of names, keys and places.

    Raises:
        DataError: `length` is too short for so many keys, or there are fewer names.

    Example:
        >>> from hf_posswap.training.tokenizer import byte_tokenizer
        >>> task = passkeys(byte_tokenizer(), 400, documents=2, questions=3)
        >>> [len(document) for document in task.documents], [question.document for question in task.questions]
        ([400, 400], [0, 0, 0, 1, 1, 1])
    """
    pairs = retrieval_texts("passkey", documents * questions, seed)
    before, after = special_frame(tokenizer)
    once = _plain(tokenizer, FILLER)
    random = np.random.default_rng((seed, length))
    texts, asked = [], []
    for number in range(documents):
        mine = pairs[number * questions : (number + 1) * questions]
        facts = [_plain(tokenizer, f" {fact} ") for fact, _ in mine]
        room = length - len(before) - len(after) - sum(map(len, facts))
        if room < 0:
            raise DataError(f"{questions} pass keys take {length - room} tokens here, got documents of {length}.")
        filler, ids, done = once * (room // len(once) + 1), list(before), 0
        for fact, words, place in zip(facts, mine, _places(room, questions, random), strict=True):
            ids += filler[done:place]
            asked.append(Question(tuple(tokenizer(words[1])["input_ids"]), number, len(ids)))
            ids += fact
            done = place
        texts.append((*ids, *filler[done:room], *after))
    return Task("passkey", length, tuple(texts), tuple(asked))


def passages(tokenizer: Any, rows: np.ndarray, length: int, questions: int, seed: int = 0) -> Task:
    """Return the beginnings of real texts without some passages, which are the questions.

    The inverse cloze task, https://arxiv.org/abs/1906.00300: what stands around a passage is to be found by it.

    Args:
        tokenizer: of the models.
        rows: tokens of each text, [N, at least `needed(length, questions)`].
        length: tokens of a document.
        questions: passages of each.
        seed: of the places.

    Raises:
        DataError: the texts, or the parts that the passages come from, are too short.

    Example:
        >>> from hf_posswap.training.tokenizer import byte_tokenizer
        >>> task = passages(byte_tokenizer(), np.arange(200).reshape(2, 100) % 97, 64, questions=1)
        >>> len(task.documents[1]), len(task.questions[1].tokens)
        (64, 32)
    """
    before, after = special_frame(tokenizer)
    inside = length - len(before) - len(after)
    part = needed(inside, questions) // questions
    if inside < 1 or part < PASSAGE or rows.shape[1] < needed(inside, questions):
        raise DataError(
            f"{questions} passages of {PASSAGE} tokens from documents of {length} take texts of "
            f"{needed(length, questions)} tokens, and one token left of each part at least; got {rows.shape[1]}."
        )
    random = np.random.default_rng((seed, length))
    texts, asked = [], []
    for number, row in enumerate(rows[:, : needed(inside, questions)].tolist()):
        ids, done = list(before), 0
        for i in range(questions):
            start = i * part + int(random.integers(0, part - PASSAGE + 1))
            ids += row[done:start]
            done = start + PASSAGE
            asked.append(Question((*before, *row[start:done], *after), number, len(ids)))
        texts.append((*ids, *row[done:], *after))
    return Task("passage", length, tuple(texts), tuple(asked))


def needed(length: int, questions: int) -> int:
    """Return how many tokens a text has from which `length` are left without the passages.

    Example:
        >>> needed(512, 8)
        768
    """
    return length + questions * PASSAGE


def windows(document: Sequence[int], window: int, frame: tuple[list[int], list[int]]) -> Iterator[tuple[int, ...]]:
    """Give the windows of a document one after another, each of at most `window` tokens with its own special ones.

    Example:
        >>> list(windows([1, 5, 6, 7, 8, 9, 2], 4, ([1], [2])))
        [(1, 5, 6, 2), (1, 7, 8, 2), (1, 9, 2)]
    """
    before, after = frame
    inside, room = document[len(before) : len(document) - len(after)], window - len(before) - len(after)
    for start in range(0, len(inside), room):
        yield (*before, *inside[start : start + room], *after)


def ranks(asked: np.ndarray, held: np.ndarray, right: Sequence[int]) -> np.ndarray:
    """Return what place the right document has among all by the nearest of its vectors, 1 for the first, int [Q].

    Another document that is just as near stands before it: vectors that say nothing find nothing.

    Args:
        asked: vectors of the questions, of length 1, [Q, E].
        held: vectors of the documents, of length 1, V of each, [N, V, E].
        right: number of the right document of each question, [Q].

    Example:
        >>> ranks(np.eye(2), np.eye(2)[:, None], [0, 0]).tolist()
        [1, 2]
    """
    near = np.einsum("qe,nve->qnv", asked, held).max(axis=2)  # [Q, N]
    own = near[np.arange(len(asked)), list(right)]  # [Q]
    return np.asarray((near >= own[:, None]).sum(axis=1))


def gains(places: np.ndarray) -> np.ndarray:
    """Return the nDCG at 10 of each question with one right document, by its rank: 1 / log2(1 + rank), float64.

    Example:
        >>> gains(np.array([1, 3, 11])).tolist()
        [1.0, 0.5, 0.0]
    """
    return np.where(places <= NEAREST, 1 / np.log2(1 + places), 0.0)


def _places(room: int, count: int, random: np.random.Generator) -> list[int]:
    """Return one place of [0, room] in each of `count` equal parts of it, in rising order."""
    edges = [i * room // count for i in range(count + 1)]
    return [int(random.integers(low, high + 1)) for low, high in zip(edges[:-1], edges[1:], strict=True)]


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
