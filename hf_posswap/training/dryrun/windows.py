"""Windows of synthetic tokens, cut as the recipe cuts text: a dry run needs neither text nor tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from hf_posswap.text.stdlib import PYTHON
from hf_posswap.training.data import DataSettings, TokenData
from hf_posswap.training.data.build import cut_data
from hf_posswap.training.data.masking import Masking
from hf_posswap.training.data.settings import Source
from hf_posswap.training.data.store import TokenStore

_PACKED = 4
"""Documents in a window with packing."""
_DOCUMENTS = 8


def synthetic_windows(
    settings: DataSettings, config: Any, *, causal: bool, scheme_length: int, first_position: int, dtype: torch.dtype
) -> TokenData:
    """Return full windows: of one long document each, or of four packed documents.

    Args:
        settings: of the recipe.
        config: the model's text config.
        causal: whether it predicts the next token; otherwise it predicts masked ones.
        scheme_length: positions that the swapped model is meant for.
        first_position: value of position 0 in its `position_ids`.
        dtype: of its weights.
    """
    packed = settings.packing == "documents"
    longest = settings.length // _PACKED if packed else max(settings.length, scheme_length) + 1
    reserved_ids = {config.pad_token_id, 0}  # some classes derive positions from padding tokens
    token_ids = np.array(
        [token_id for token_id in range(min(config.vocab_size, 64)) if token_id not in reserved_ids], dtype=np.int32
    )
    documents = _DOCUMENTS * (_PACKED if packed else 1)
    tokens = np.resize(token_ids, documents * longest)
    store = TokenStore(tokens, np.arange(documents + 1, dtype=np.int64) * longest, digest="")
    empty_store = TokenStore(tokens[:0], np.zeros(1, dtype=np.int64), digest="")
    special = (int(token_ids[0]),)
    return cut_data(
        dataclasses.replace(settings, sources=(Source(PYTHON),)),
        [store],
        [empty_store],
        masking=None if causal else Masking(settings.mask_share, int(token_ids[0]), token_ids, special, special),
        filler=int(token_ids[0]),
        scheme_length=scheme_length,
        first_position=first_position,
        dtype=dtype,
    )
