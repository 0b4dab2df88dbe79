"""The first long documents of a data set on the Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posswap.errors import DataError
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.text.hub import HubText, hub_documents
from hf_posswap.text.stdlib import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPLITS = ("test", "validation", "train")
_MOST_ROWS = 100_000
_CHARACTERS_PER_TOKEN = 32


def stream_documents(
    source: HubText, tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int, column: str
) -> list[Document]:
    """Return the first `limit` rows with at least `length` tokens among the first 100,000 rows of a data set.

    If too few are as long, shorter rows for `joining` are returned too, up to `limit` times `length` tokens.

    Args:
        source: the data set; without a split, the first of test, validation and train that it has.
        tokenizer: the models' tokenizer.
        length: tokens of each document.
        limit: maximum number of documents.
        column: the text column.

    Raises:
        DataError: the data set cannot be reached or read, has no such split or column, or has too little text.
        MissingDependencyError: the package datasets is not installed.
    """
    kept: list[Document] = []
    shorter: list[Document] = []
    seen = shorter_tokens = 0
    for seen, document in enumerate(hub_documents(source, column=column, splits=_SPLITS), 1):
        text = document.text[: length * _CHARACTERS_PER_TOKEN]
        tokens = _tokens(text, tokenizer)
        if tokens >= length:
            kept.append(Document(document.name, text))
        elif shorter_tokens < limit * length:
            shorter.append(Document(document.name, text))
            shorter_tokens += tokens
        if len(kept) == limit or seen == _MOST_ROWS:
            break
    if len(kept) + shorter_tokens // length < 2:
        raise DataError(
            f"{len(kept)} of the first {seen} rows of {source} have {length} tokens, at least 2 are needed: give a "
            "data set of longer documents or measure shorter lengths."
        )
    return kept if len(kept) >= min(limit, LEAST_DOCUMENTS) else [*kept, *shorter]


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return len(ids) + (tokenizer.bos_token_id is not None)
