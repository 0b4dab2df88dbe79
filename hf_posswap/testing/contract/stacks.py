"""Which stack of an encoder-decoder reads the words of a point, and what the other one reads meanwhile."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_posswap.testing.contract.models import FIRST_WORD, VOCABULARY, Tiny


def _fixed(length: int, seed: int) -> Tensor:
    return torch.randint(FIRST_WORD, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


SOURCE = _fixed(12, seed=7)
"""What the encoder reads while a point is about the decoder: [1, 12]."""
TARGET = _fixed(9, seed=8)
"""What the decoder reads while a point is about the encoder: [1, 9]."""
HEARD = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(9))
"""What an encoder that hears takes in place of tokens, two frames for a state of it: [1, mel bins, frames]."""

_DECODERS_OWN = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")
"""Arguments that have a name of their own where they are the decoder's."""


def named(stack: str, argument: str) -> str:
    """Return what a model calls the `argument` of this stack."""
    return f"decoder_{argument}" if stack == "decoder" and argument in _DECODERS_OWN else argument


def given(tiny: Tiny, stack: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what a forward is called with.

    Args:
        tiny: of the model.
        stack: which reads the words; "": the only one.
        arguments: as a model of one stack calls them. Position ids that an encoder-decoder does not take are left out,
            and the labels of an encoder are what the decoder reads.
    """
    if not stack:
        return arguments
    rows = len(next(value for name in ("input_ids", "inputs_embeds") if (value := arguments.get(name)) is not None))
    taken = {named(stack, name): value for name, value in arguments.items()}
    if not tiny.takes(named(stack, "position_ids")):
        taken.pop(named(stack, "position_ids"), None)
    if stack == "encoder":
        target = TARGET.expand(rows, -1)
        return taken | {"decoder_input_ids": target} | ({"labels": target} if "labels" in taken else {})
    if tiny.hears:
        return taken | {"input_features": HEARD.expand(rows, -1, -1)}
    source = SOURCE.expand(rows, -1)
    return taken | {"input_ids": source, "attention_mask": torch.ones_like(source)}


def cache_of(kind: str, config: Any, tiny: Tiny, length: int) -> Any:
    """Return an empty cache with room for `length` tokens; behind an encoder it has a part for what that one says."""
    stock_cache = _cache(kind, config, length)
    if not tiny.paired:
        return stock_cache
    seen = copy.deepcopy(config.get_text_config(decoder=True))  # by cross-attention, which has no sliding window
    seen.sliding_window, seen.layer_types = None, None
    return EncoderDecoderCache(stock_cache, _cache(kind, seen, HEARD.shape[2] // 2 if tiny.hears else SOURCE.shape[1]))


def _cache(kind: str, config: Any, length: int) -> Any:
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=length)
