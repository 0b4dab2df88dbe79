"""The special tokens around a text, such as [CLS] and [SEP], found by tokenizing with and without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posswap.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that `tokenizer` adds before and after a text.

    Raises:
        DataError: the text's own tokens change when special tokens are added.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> special_frame(byte_tokenizer())
        ([], [])
    """
    plain = tokenizer("one two", add_special_tokens=False)["input_ids"]
    framed = tokenizer("one two")["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return list(framed[:start]), list(framed[start + len(plain) :])
    raise DataError(f"{type(tokenizer).__name__} changes a text's tokens when it adds special ones: {plain}, {framed}.")
