"""What an encoder has to guess: some tokens, most of them hidden."""

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
    """How tokens are hidden from an encoder.

    Attributes:
        share: of the tokens to guess.
        mask: id of the mask token.
        words: ids that stand in for a token, without special ones.
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
        """Return `ids` with some tokens hidden, and the labels, -100 where nothing is to be guessed; both int64 [n].

        As BERT was trained: of the tokens to guess, 80 % become the mask, 10 % another token, 10 % stay.
        At least one token is to be guessed.
        """
        ids = ids.astype(np.int64)
        chosen = random.random(len(ids)) < self.share
        chosen[int(random.integers(len(ids)))] |= not chosen.any()
        labels = np.where(chosen, ids, IGNORED)
        fate = random.random(len(ids))
        others = self.words[random.integers(0, len(self.words), len(ids))]
        swapped = np.where(fate < _HIDDEN + _SWAPPED, others, ids)
        return np.where(chosen, np.where(fate < _HIDDEN, self.mask, swapped), ids), labels


def make_masking(tokenizer: PreTrainedTokenizerBase, share: float) -> Masking:
    """Return how the tokens of this tokenizer are hidden.

    Raises:
        DataError: it has no mask token.
    """
    mask: Any = tokenizer.mask_token_id
    if mask is None:
        raise DataError(
            f"{type(tokenizer).__name__} has no mask token, and an encoder learns to guess masked tokens: use the "
            "tokenizer that belongs to the model."
        )
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    wrapped = tokenizer("a")["input_ids"]
    at = next((k for k in range(len(wrapped)) if wrapped[k : k + len(plain)] == plain), 0)
    words = np.setdiff1d(np.arange(len(tokenizer)), np.array(tokenizer.all_special_ids))
    return Masking(share, int(mask), words, tuple(wrapped[:at]), tuple(wrapped[at + len(plain) :]))
