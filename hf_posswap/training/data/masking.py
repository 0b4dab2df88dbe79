"""Masks tokens for an encoder to predict, as BERT does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
_HIDDEN, _SWAPPED = 0.8, 0.1


@dataclass(frozen=True)
class Masking:
    """How tokens are masked for an encoder.

    Attributes:
        share: share of the tokens to predict.
        mask: id of the mask token.
        words: ids that may replace a token, without special ones.
        before: special ids before a piece, [CLS].
        after: special ids after it, [SEP].
    """

    share: float
    mask: int
    words: np.ndarray
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def around(self) -> int:
        """Special tokens of a piece."""
        return len(self.before) + len(self.after)

    def hide(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `ids` with some tokens masked, and the labels, -100 where nothing is predicted; both int64 [n].

        As in BERT, 80 % of the tokens to predict become the mask, 10 % a random token, and 10 % stay. At least one
        token is predicted.
        """
        ids = ids.astype(np.int64)
        chosen = random.random(len(ids)) < self.share
        chosen[int(random.integers(len(ids)))] |= not chosen.any()
        labels = np.where(chosen, ids, IGNORED)
        draw = random.random(len(ids))
        random_ids = self.words[random.integers(0, len(self.words), len(ids))]
        swapped = np.where(draw < _HIDDEN + _SWAPPED, random_ids, ids)
        return np.where(chosen, np.where(draw < _HIDDEN, self.mask, swapped), ids), labels


def make_masking(tokenizer: PreTrainedTokenizerBase, share: float) -> Masking:
    """Return the masking for the tokens of `tokenizer`.

    Raises:
        DataError: it has no mask token.
    """
    mask: Any = tokenizer.mask_token_id
    if mask is None:
        raise DataError(
            f"{type(tokenizer).__name__} has no mask token, and an encoder learns to predict masked tokens: use the "
            "model's own tokenizer."
        )
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    wrapped = tokenizer("a")["input_ids"]
    start = next((k for k in range(len(wrapped)) if wrapped[k : k + len(plain)] == plain), 0)
    replacement_ids = np.setdiff1d(np.arange(len(tokenizer)), np.array(tokenizer.all_special_ids))
    return Masking(share, int(mask), replacement_ids, tuple(wrapped[:start]), tuple(wrapped[start + len(plain) :]))
