"""Retrieval tasks on long texts: passkeys in filler, and passages removed from real text.

Each document has several questions, one per equal part of it, so that a model which reads only an eighth of the text
can answer one of eight. The answer is the document: only it contains the question's text, or the passage was cut from
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posswap.errors import DataError
from hf_posswap.evaluation.masked import special_frame
from hf_posswap.evaluation.retrieval import FILLER, retrieval_texts

PASSAGE = 32
"""Tokens of a removed passage."""
NEAREST = 10
"""Cutoff rank of nDCG."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        tokens: with the special ones around them.
        document: index of the document that answers it.
        place: tokens of that document before the answer.
    """

    tokens: tuple[int, ...]
    document: int
    place: int


@dataclass(frozen=True)
class Task:
    """Documents of one length, with special tokens, and equally many questions per document, in its order."""

    name: str
    length: int
    documents: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]


def passkeys(tokenizer: Any, length: int, documents: int, questions: int, seed: int = 0) -> Task:
    """Return documents of filler, each with the pass keys of some names, and questions for these keys.

    Args:
        tokenizer: of the models.
        length: tokens of a document.
        documents: how many.
        questions: of each.
        seed: of names, keys and places.

    Raises:
        DataError: `length` is too short for so many keys, or there are fewer names.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> task = passkeys(byte_tokenizer(), 400, documents=2, questions=3)
        >>> [len(document) for document in task.documents], [question.document for question in task.questions]
        ([400, 400], [0, 0, 0, 1, 1, 1])
    """
    pairs = retrieval_texts("passkey", documents * questions, seed)
    before, after = special_frame(tokenizer)
    filler_line = _plain(tokenizer, FILLER)
    random = np.random.default_rng((seed, length))
    texts, task_questions = [], []
    for number in range(documents):
        document_pairs = pairs[number * questions : (number + 1) * questions]
        fact_ids = [_plain(tokenizer, f" {fact} ") for fact, _ in document_pairs]
        room = length - len(before) - len(after) - sum(map(len, fact_ids))
        if room < 0:
            raise DataError(f"{questions} pass keys take {length - room} tokens here, got documents of {length}.")
        filler, ids, used = filler_line * (room // len(filler_line) + 1), list(before), 0
        for fact, pair, position in zip(fact_ids, document_pairs, _positions(room, questions, random), strict=True):
            ids += filler[used:position]
            task_questions.append(Question(tuple(tokenizer(pair[1])["input_ids"]), number, len(ids)))
            ids += fact
            used = position
        texts.append((*ids, *filler[used:room], *after))
    return Task("passkey", length, tuple(texts), tuple(task_questions))


def passages(tokenizer: Any, rows: np.ndarray, length: int, questions: int, seed: int = 0) -> Task:
    """Return the beginnings of real texts with some passages removed, which are the questions.

    The inverse cloze task, https://arxiv.org/abs/1906.00300: a passage must retrieve its context.

    Args:
        tokenizer: of the models.
        rows: tokens of each text, [N, at least `needed(length, questions)`].
        length: tokens of a document.
        questions: passages of each.
        seed: of the places.

    Raises:
        DataError: the texts, or the parts that the passages come from, are too short.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> task = passages(byte_tokenizer(), np.arange(200).reshape(2, 100) % 97, 64, questions=1)
        >>> len(task.documents[1]), len(task.questions[1].tokens)
        (64, 32)
    """
    before, after = special_frame(tokenizer)
    inside = length - len(before) - len(after)
    part_length = needed(inside, questions) // questions
    if inside < 1 or part_length < PASSAGE or rows.shape[1] < needed(inside, questions):
        raise DataError(
            f"{questions} passages of {PASSAGE} tokens from documents of {length} take texts of "
            f"{needed(length, questions)} tokens, and one token left of each part at least; got {rows.shape[1]}."
        )
    random = np.random.default_rng((seed, length))
    texts, task_questions = [], []
    for number, row in enumerate(rows[:, : needed(inside, questions)].tolist()):
        ids, used = list(before), 0
        for i in range(questions):
            start = i * part_length + int(random.integers(0, part_length - PASSAGE + 1))
            ids += row[used:start]
            used = start + PASSAGE
            task_questions.append(Question((*before, *row[start:used], *after), number, len(ids)))
        texts.append((*ids, *row[used:], *after))
    return Task("passage", length, tuple(texts), tuple(task_questions))


def needed(length: int, questions: int) -> int:
    """Return the tokens of a text that leaves `length` tokens after the passages are removed.

    Example:
        >>> needed(512, 8)
        768
    """
    return length + questions * PASSAGE


def windows(document: Sequence[int], window: int, frame: tuple[list[int], list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield the windows of a document in order, each of at most `window` tokens with its own special ones.

    Example:
        >>> list(windows([1, 5, 6, 7, 8, 9, 2], 4, ([1], [2])))
        [(1, 5, 6, 2), (1, 7, 8, 2), (1, 9, 2)]
    """
    before, after = frame
    inside, room = document[len(before) : len(document) - len(after)], window - len(before) - len(after)
    for start in range(0, len(inside), room):
        yield (*before, *inside[start : start + room], *after)


def ranks(question_vectors: np.ndarray, document_vectors: np.ndarray, right_documents: Sequence[int]) -> np.ndarray:
    """Return the rank of the right document by the nearest of its vectors, from 1, int [Q].

    A tie counts against the right document, so that uninformative vectors score nothing.

    Args:
        question_vectors: vectors of the questions, of length 1, [Q, E].
        document_vectors: vectors of the documents, of length 1, V of each, [N, V, E].
        right_documents: number of the right document of each question, [Q].

    Example:
        >>> ranks(np.eye(2), np.eye(2)[:, None], [0, 0]).tolist()
        [1, 2]
    """
    similarity = np.einsum("qe,nve->qnv", question_vectors, document_vectors).max(axis=2)  # [Q, N]
    right_similarity = similarity[np.arange(len(question_vectors)), list(right_documents)]  # [Q]
    return np.asarray((similarity >= right_similarity[:, None]).sum(axis=1))


def gains(right_ranks: np.ndarray) -> np.ndarray:
    """Return the nDCG at 10 of each question with one right document, by its rank: 1 / log2(1 + rank), float64.

    Example:
        >>> gains(np.array([1, 3, 11])).tolist()
        [1.0, 0.5, 0.0]
    """
    return np.where(right_ranks <= NEAREST, 1 / np.log2(1 + right_ranks), 0.0)


def _positions(room: int, count: int, random: np.random.Generator) -> list[int]:
    """Return one position of [0, room] in each of `count` equal parts of it, ascending."""
    edges = [i * room // count for i in range(count + 1)]
    return [int(random.integers(low, high + 1)) for low, high in zip(edges[:-1], edges[1:], strict=True)]


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
