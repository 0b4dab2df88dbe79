"""From a tokenizer and documents to arrays of token ids: a stream to learn from, the first of each to measure on.

Every document begins with the tokenizer's begin-of-text token where it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.errors import DataError, PosswapError
from hf_posswap.text.stdlib import Document
from hf_posswap.utils.auto_classes import auto_tokenizer
from hf_posswap.utils.format import said_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHARACTERS_A_TOKEN = 32  # so that of a book only the beginning is tokenized where only that is asked for


def load_tokenizer(
    source: str | Path, *, instead: str, trust_remote_code: bool = False, **hub: Any
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or Hub id, which can read text.

    Args:
        source: the folder or Hub id.
        instead: what to do where there is none, for the message.
        trust_remote_code: run code that it brings, where the tokenizer is code.
        hub: revision, token, ... for a Hub id, and what else AutoTokenizer takes.

    Raises:
        DataError: there is none that can be read.
        RemoteCodeError: it is code, which was not asked for.
    """
    try:
        tokenizer = auto_tokenizer(source, trust_remote_code=trust_remote_code, **hub)
    except PosswapError:
        raise
    except Exception as error:  # a tokenizer's own code may raise anything
        said = said_by(error).rstrip(".")
        raise DataError(f"{str(source)!r} has no tokenizer that can be read ({said}): {instead}.") from error
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:  # made up where its files are missing
        raise DataError(f"{str(source)!r} has no tokenizer that can be read (it has no vocabulary): {instead}.")
    return tokenizer


def token_stream(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> np.ndarray:
    """Return the tokens of whole `documents`, one after another, int32 [N].

    Args:
        documents: in the order to take them.
        tokenizer: of the model.
        limit: stop after the document that brings the stream to this many tokens; None: take all.

    Raises:
        DataError: there is no token.

    Example:
        >>> from hf_posswap.training.tokenizer import byte_tokenizer
        >>> token_stream([Document("a", "hi"), Document("b", "!")], byte_tokenizer()).tolist()
        [256, 104, 105, 256, 33]
    """
    parts: list[np.ndarray] = []
    count = 0
    for document in documents:
        if limit is not None and count >= limit:
            break
        parts.append(_encode(document.text, tokenizer))
        count += len(parts[-1])
    if count == 0:
        raise DataError(f"{len(documents)} documents gave no token: give text.")
    return np.concatenate(parts)


def split_by_length(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int
) -> tuple[list[tuple[str, np.ndarray]], list[tuple[str, np.ndarray]]]:
    """Return names and first `length` tokens of the first `limit` documents that have as many, and of the shorter ones.

    Args:
        documents: in the order to take them; those after the last that is taken are not read.
        tokenizer: of the model.
        length: tokens of each.
        limit: most long documents to take.

    Example:
        >>> from hf_posswap.training.tokenizer import byte_tokenizer
        >>> texts = [Document("a", "long enough"), Document("b", "no"), Document("c", "also long")]
        >>> [[name for name, _ in part] for part in split_by_length(texts, byte_tokenizer(), length=4, limit=9)]
        [['a', 'c'], ['b']]
    """
    long: list[tuple[str, np.ndarray]] = []
    short: list[tuple[str, np.ndarray]] = []
    for document in documents:
        if len(long) == limit:
            break
        ids = _encode(document.text[: length * _CHARACTERS_A_TOKEN], tokenizer)
        (long if len(ids) >= length else short).append((document.name, ids[:length]))
    return long, short


def check_token_ids(model: PreTrainedModel, tokens: np.ndarray) -> None:
    """Check that `model` has an embedding for each of `tokens`, an array of any shape.

    Raises:
        DataError: it has not: the tokenizer is another model's.
    """
    embeddings: Any = model.get_input_embeddings()
    rows, low, high = embeddings.weight.shape[0], int(tokens.min()), int(tokens.max())
    if low < 0 or high >= rows:
        raise DataError(
            f"the tokens run from {low} to {high}, and {type(model).__name__} has embeddings for 0 to {rows - 1}: "
            "use the tokenizer that belongs to the model."
        )


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # longer than the window on purpose
    bos = tokenizer.bos_token_id
    return np.array(ids if bos is None else [bos, *ids], dtype=np.int32)
