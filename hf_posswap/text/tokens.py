"""Tokenization of documents: a stream for training, the first tokens of each for evaluation.

Every document begins with the tokenizer's begin-of-text token, if it has one; those of encoders, which read windows
with the tokenizer's special tokens around them, do not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.errors import DataError, PosswapError
from hf_posswap.text.stdlib import Document
from hf_posswap.utils.auto_classes import auto_tokenizer
from hf_posswap.utils.format import said_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHARACTERS_PER_TOKEN = 32  # only the beginning of a long text is tokenized


_ANOTHER = "give one by --tokenizer, or by tokenizer in Python"


def load_tokenizer(
    source: str | Path, *, instead: str = _ANOTHER, trust_remote_code: bool = False, **hub: object
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or Hub id, which can read text.

    Args:
        source: the folder or Hub id.
        instead: advice for the error message if there is no tokenizer.
        trust_remote_code: run the tokenizer's own code, if it has any.
        hub: revision, token, ... for a Hub id, and what else AutoTokenizer takes.

    Raises:
        DataError: there is no readable tokenizer.
        RemoteCodeError: it needs code without `trust_remote_code`.
    """
    try:
        tokenizer = auto_tokenizer(source, trust_remote_code=trust_remote_code, **hub)
    except PosswapError:
        raise
    except Exception as error:  # a tokenizer's own code may raise anything
        reason = said_by(error).rstrip(".")
        raise DataError(f"{str(source)!r} has no tokenizer that can be read ({reason}): {instead}.") from error
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:  # made up where its files are missing
        raise DataError(f"{str(source)!r} has no tokenizer that can be read (it has no vocabulary): {instead}.")
    return tokenizer


def with_eos_token(tokenizer: PreTrainedTokenizerBase, token: str | None) -> PreTrainedTokenizerBase:
    """Return `tokenizer` with `token` as its end-of-text token: itself if it has that one or `token` is None.

    Raises:
        DataError: the vocabulary has no such token.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> with_eos_token(byte_tokenizer(), "A").eos_token_id
        65
    """
    if token is None or token == tokenizer.eos_token:
        return tokenizer
    if token not in tokenizer.get_vocab():
        special = ", ".join(sorted(map(repr, tokenizer.all_special_tokens))) or "none"
        raise DataError(
            f"data.eos_token is a token of the vocabulary, and {type(tokenizer).__name__} has no {token!r} (its "
            f"special tokens: {special}): take one of its tokens, or add this one to tokenizer and model."
        )
    changed = copy.deepcopy(tokenizer)
    changed.eos_token = token
    return changed


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
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> token_stream([Document("a", "hi"), Document("b", "!")], byte_tokenizer()).tolist()
        [256, 104, 105, 256, 33]
    """
    chunks: list[np.ndarray] = []
    count = 0
    for document in documents:
        if limit is not None and count >= limit:
            break
        chunks.append(_encode(document.text, tokenizer))
        count += len(chunks[-1])
    if count == 0:
        raise DataError(f"{len(documents)} documents gave no token: give text.")
    return np.concatenate(chunks)


def split_by_length(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int, begin: bool = True
) -> tuple[list[tuple[str, np.ndarray]], list[tuple[str, np.ndarray]]]:
    """Return names and first `length` tokens of up to `limit` documents of that length, and of shorter ones.

    Args:
        documents: in order of use; documents after the last used one are not read.
        tokenizer: of the model.
        length: tokens of each.
        limit: maximum number of long documents.
        begin: whether each begins with the tokenizer's begin-of-text token.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> texts = [Document("a", "long enough"), Document("b", "no"), Document("c", "also long")]
        >>> [[name for name, _ in part] for part in split_by_length(texts, byte_tokenizer(), length=4, limit=9)]
        [['a', 'c'], ['b']]
    """
    long: list[tuple[str, np.ndarray]] = []
    short: list[tuple[str, np.ndarray]] = []
    for document in documents:
        ids = _encode(document.text[: length * _CHARACTERS_PER_TOKEN], tokenizer, begin)
        (long if len(ids) >= length else short).append((document.name, ids[:length]))
        if len(long) >= limit:  # before the next document is read: a stream may take its time, or never end
            break
    return long, short


def check_token_ids(model: PreTrainedModel, tokens: np.ndarray) -> None:
    """Check that `model` has an embedding for each of `tokens`, an array of any shape.

    Raises:
        DataError: an id has no embedding, so the tokenizer belongs to another model.
    """
    embeddings: Any = model.get_input_embeddings()
    rows, low, high = embeddings.weight.shape[0], int(tokens.min()), int(tokens.max())
    if low < 0 or high >= rows:
        raise DataError(
            f"the tokens run from {low} to {high}, and {type(model).__name__} has embeddings for 0 to {rows - 1}: "
            "use the tokenizer that belongs to the model."
        )


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, begin: bool = True) -> np.ndarray:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # longer than the window on purpose
    bos = tokenizer.bos_token_id if begin else None
    return np.array(ids if bos is None else [bos, *ids], dtype=np.int32)


def tokens_after(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of `text` after another one: some tokenizers write a space before the first word of all.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> bytes(tokens_after(byte_tokenizer(), " 12"))
        b' 12'
    """
    before = "\n" if text[:1].isalnum() else "a"  # no token has its end and the beginning of `text`
    first, both = (
        list(tokenizer(given, add_special_tokens=False, verbose=False)["input_ids"])
        for given in (before, before + text)
    )
    return both[len(first) :]
