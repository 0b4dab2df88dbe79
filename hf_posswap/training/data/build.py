"""From settings to windows that a model can be trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.training.data.settings import DataSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenData:
    """What a run trains on.

    Attributes:
        train: item i is a dict of the model's arguments without the batch dimension ("input_ids", "labels",
            "attention_mask" or not, "position_ids" or not), and depends on the settings and i alone. Its length is one
            pass over the text; `train.sized(n)` has n items, later passes in other orders: read it in order.
        collate: makes a batch of items, a dict for `model(**batch)`; it says `use_cache=False`, because a cache would
            switch the masks of packed documents off.
        held_out: token ids of the documents that training never sees, whole, int32 [any length].
        summary: counts of documents, tokens and windows, of each source and in sum, as JSON.
    """

    train: torch.utils.data.Dataset[dict[str, torch.Tensor]]
    collate: Callable[[list[dict[str, torch.Tensor]]], dict[str, Any]]
    held_out: Sequence[np.ndarray]
    summary: dict[str, Any]


def build_data(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    causal: bool,
    scheme_length: int,
    first_position: int = 0,
) -> TokenData:
    """Return what to train on.

    Args:
        settings: what, and how windows are cut.
        tokenizer: of the model.
        causal: whether the model predicts the next token; otherwise masked ones.
        scheme_length: positions the swapped model is meant for, `SwapRecord.max_length`: "pose" and "random-positions"
            reach up to it.
        first_position: what the model's `position_ids` call position 0, `Sites.first_position`.
    """
    raise NotImplementedError
