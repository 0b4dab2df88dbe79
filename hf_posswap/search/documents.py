"""The documents that candidates are measured on, from texts or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hf_posswap.errors import DataError
from hf_posswap.text.stdlib import Document
from hf_posswap.text.tokens import token_stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS_PER_TOKEN = 32  # only the beginning of a long text is tokenized


def leading_documents(texts: Any, tokenizer: PreTrainedTokenizerBase | None, length: int) -> np.ndarray:
    """Return the first `length` tokens of each of `texts`, int32 [N, length].

    Args:
        texts: a list of strings, or of token ids: lists, arrays or tensors [at least `length`]; or one array of them.
        tokenizer: for strings; it adds its begin-of-text token, if it has one.
        length: tokens of each document.

    Raises:
        DataError: there is no text, a text is too short, strings have no tokenizer, or ids are not whole numbers.

    Example:
        >>> leading_documents([[1, 2, 3, 4], [5, 6, 7, 8]], None, 3).tolist()
        [[1, 2, 3], [5, 6, 7]]
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence | np.ndarray | Tensor) or len(texts) == 0:
        raise DataError(f"texts must be a list of texts, or of token ids, one per document; got {_brief(texts)}.")
    are_strings = {isinstance(text, str) for text in texts}
    if len(are_strings) > 1:
        raise DataError("texts holds strings and token ids; give all as one or all as the other.")
    if are_strings == {True}:
        if tokenizer is None:
            raise DataError("texts holds strings: give the model's tokenizer too, or token ids instead.")
        rows = [_tokens(text, tokenizer, length) for text in texts]
    else:
        rows = token_rows(texts, "texts")
    for index, row in enumerate(rows):
        if len(row) < length:
            raise DataError(
                f"texts[{index}] has {len(row)} tokens, and each is measured at the target length of {length}: "
                "give longer texts or a smaller factor."
            )
    return np.stack([row[:length] for row in rows]).astype(np.int32)


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase, length: int) -> np.ndarray:
    from hf_posswap.utils.progress import quiet_transformers

    start = text[: length * _CHARACTERS_PER_TOKEN]
    if not start:
        return np.zeros(0, dtype=np.int32)
    with quiet_transformers():  # it warns about texts beyond the model's length, which are intended here
        return token_stream([Document("text", start)], tokenizer)


def token_rows(rows: Any, name: str = "tokens") -> list[np.ndarray]:
    """Return each of `rows` of token ids, lists, arrays or tensors, as an array [any length >= 1].

    Args:
        rows: a list of rows, or one array or tensor of them.
        name: name of the argument, for error messages.

    Raises:
        DataError: there are no rows, or one is empty or not a row of whole numbers.

    Example:
        >>> token_rows([[1, 2], np.array([3])])
        [array([1, 2]), array([3])]
    """
    if isinstance(rows, str) or not isinstance(rows, Sequence | np.ndarray | Tensor) or len(rows) == 0:
        raise DataError(f"{name} must be rows of token ids, one per text, got {_brief(rows)}.")
    arrays = []
    for index, ids in enumerate(rows):
        try:
            row = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
        except (TypeError, ValueError):
            row = np.zeros(0)
        if row.ndim != 1 or len(row) == 0 or row.dtype.kind not in "iu":
            expected = "a string or a row of whole token ids" if name == "texts" else "a row of whole token ids"
            raise DataError(f"{name}[{index}] must be {expected}, got {_brief(ids)}.")
        arrays.append(row)
    return arrays


def _brief(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
