"""Documents of the length that is asked for: whole ones, and where these are few, short ones joined, named as such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hf_posswap.errors import DataError
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.text.stdlib import Document
from hf_posswap.text.tokens import split_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHOLE, JOINED = "whole_documents", "concatenated"


@dataclass(frozen=True)
class Cut:
    """Text of one length.

    Attributes:
        names: of the rows; a joined one is called by its first document and how many follow it.
        tokens: ids, [N, L].
        protocol: `WHOLE`: each row is the beginning of one document; `JOINED`: some rows are short documents one after
            another, so that far context is other documents' text.
        said: the same in words, with the numbers.
    """

    names: tuple[str, ...]
    tokens: np.ndarray
    protocol: str
    said: str


def cut_documents(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int) -> Cut:
    """Return the first `length` tokens of up to `limit` documents, short ones joined where too few are long enough.

    Where 8 documents, or as many as are wanted, are long enough, or joining gives no further row, each row is the
    beginning of one document, and shorter documents are left out. Otherwise they follow one another in rows of their
    own, each whole and begun as the tokenizer begins a text, but the last of a row, which is cut.

    Args:
        documents: in the order to take them.
        tokenizer: of the models.
        length: tokens of a row.
        limit: most rows.

    Raises:
        DataError: there are fewer than two rows.

    Example:
        >>> from hf_posswap.training.tokenizer import byte_tokenizer
        >>> cut = cut_documents([Document(n, "ab" * 3) for n in "uvwxyz"], byte_tokenizer(), length=10, limit=9)
        >>> cut.names, cut.protocol
        (('u and 1 more', 'w and 1 more', 'y and 1 more'), 'concatenated')
    """
    long, short = split_by_length(documents, tokenizer, length=length, limit=limit)
    joined = _join(short, length)[: limit - len(long)] if len(long) < min(limit, LEAST_DOCUMENTS) else []
    rows = long + joined
    if len(rows) < 2:
        raise DataError(
            f"{len(long)} of {len(documents)} held-out documents have {length} tokens, at least 2 are needed, and "
            f"joined the others give {len(joined)}: give longer documents or measure shorter lengths."
        )
    if joined:
        said = (
            f"{len(joined)} of {len(rows)} are short documents joined to {length:,} tokens, because only {len(long)} "
            "are that long: far context is other documents' text there"
        )
    else:
        said = "each is the beginning of one document" + (f"; {len(short)} shorter ones are left out" if short else "")
    names = tuple(name for name, _ in rows)
    return Cut(names, np.stack([ids for _, ids in rows]), JOINED if joined else WHOLE, said)


def _join(documents: Sequence[tuple[str, np.ndarray]], length: int) -> list[tuple[str, np.ndarray]]:
    """Return rows of `length` tokens, each of documents that follow one another; what fills no row is left out."""
    rows: list[tuple[str, np.ndarray]] = []
    names: list[str] = []
    parts: list[np.ndarray] = []
    count = 0
    for name, ids in documents:
        names, parts, count = [*names, name], [*parts, ids], count + len(ids)
        if count >= length:
            rows.append((f"{names[0]} and {len(names) - 1} more", np.concatenate(parts)[:length]))
            names, parts, count = [], [], 0
    return rows
