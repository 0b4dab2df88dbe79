"""Documents of the requested length: beginnings of long ones and, if these are too few, short ones joined."""

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
        names: names of the rows; a joined row is named after its first document and the number of further ones.
        tokens: token ids, [N, L].
        protocol: `WHOLE`: each row is the beginning of one document; `JOINED`: some rows are concatenated short
            documents, so that far context is other documents' text.
        said: the protocol as text, with the numbers of rows.
    """

    names: tuple[str, ...]
    tokens: np.ndarray
    protocol: str
    said: str


def cut_documents(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int) -> Cut:
    """Return the first `length` tokens of up to `limit` documents; short ones are joined if too few are long enough.

    If at least min(8, `limit`) documents are long enough, or joining gives no further row, each row is the beginning of
    one document, and shorter documents are dropped. Otherwise short documents are concatenated to further rows. Each
    starts with the tokenizer's start tokens, and only the last one of a row is truncated.

    Args:
        documents: in order of use.
        tokenizer: the models' tokenizer.
        length: tokens of a row.
        limit: maximum number of rows.

    Raises:
        DataError: there are fewer than two rows.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
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
            f"joining the others gives {len(joined)}: give longer documents or measure shorter lengths."
        )
    if joined:
        protocol_text = (
            f"{len(joined)} of {len(rows)} are short documents joined to {length:,} tokens, because only {len(long)} "
            "are that long: far context is other documents' text there"
        )
    else:
        protocol_text = "each is the beginning of one document" + (
            f"; {len(short)} shorter ones are left out" if short else ""
        )
    names = tuple(name for name, _ in rows)
    return Cut(names, np.stack([ids for _, ids in rows]), JOINED if joined else WHOLE, protocol_text)


def _join(documents: Sequence[tuple[str, np.ndarray]], length: int) -> list[tuple[str, np.ndarray]]:
    """Concatenate consecutive documents to rows of `length` tokens; a remainder that fills no row is dropped."""
    rows: list[tuple[str, np.ndarray]] = []
    names: list[str] = []
    chunks: list[np.ndarray] = []
    count = 0
    for name, ids in documents:
        names, chunks, count = [*names, name], [*chunks, ids], count + len(ids)
        if count >= length:
            rows.append((f"{names[0]} and {len(names) - 1} more", np.concatenate(chunks)[:length]))
            names, chunks, count = [], [], 0
    return rows
