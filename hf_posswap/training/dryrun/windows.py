"""Windows of made-up tokens, cut as the recipe cuts text: a dry run needs neither text nor tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from hf_posswap.training.data import DataSettings, TokenData
from hf_posswap.training.data.build import cut_data
from hf_posswap.training.data.masking import Masking
from hf_posswap.training.data.settings import Source
from hf_posswap.training.data.store import TokenStore

_PACKED = 4
"""Documents in a window of packed ones."""
_DOCUMENTS = 8


def made_windows(
    settings: DataSettings, config: Any, *, causal: bool, scheme_length: int, first_position: int, dtype: torch.dtype
) -> TokenData:
    """Return windows that are full: of long documents, or where documents are packed of four each.

    Args:
        settings: of the recipe.
        config: of the model, that of its text.
        causal: whether it predicts the next token; otherwise masked ones.
        scheme_length: positions that the swapped model is meant for.
        first_position: what its `position_ids` call position 0.
        dtype: of its weights.
    """
    packed = settings.packing == "documents"
    longest = settings.length // _PACKED if packed else max(settings.length, scheme_length) + 1
    taken = {config.pad_token_id, 0}  # some classes count positions by what is no padding
    words = np.array([word for word in range(min(config.vocab_size, 64)) if word not in taken], dtype=np.int32)
    documents = _DOCUMENTS * (_PACKED if packed else 1)
    tokens = np.resize(words, documents * longest)
    store = TokenStore(tokens, np.arange(documents + 1, dtype=np.int64) * longest, digest="")
    nothing = TokenStore(tokens[:0], np.zeros(1, dtype=np.int64), digest="")
    special = (int(words[0]),)
    return cut_data(
        dataclasses.replace(settings, sources=(Source(),)),
        [store],
        [nothing],
        masking=None if causal else Masking(settings.mask_share, int(words[0]), words, special, special),
        filler=int(words[0]),
        scheme_length=scheme_length,
        first_position=first_position,
        dtype=dtype,
    )
