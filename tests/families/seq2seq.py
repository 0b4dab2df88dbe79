"""Tiny encoder-decoders with a table in each stack, and how to run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posswap.testing.tiny import TINY_LENGTH, TINY_VOCABULARY, tiny_model
from tests.stock import cache_in, with_cache

LENGTH, PADDING = TINY_LENGTH, 0
TABLES = {
    "BartForConditionalGeneration": 2,
    "MBartForConditionalGeneration": 2,
    "PLBartForConditionalGeneration": 2,
    "BlenderbotForConditionalGeneration": 0,
    "BlenderbotSmallForConditionalGeneration": 0,
    "PegasusForConditionalGeneration": 0,
    "MarianMTModel": 0,
    "MvpForConditionalGeneration": 2,
    "BigBirdPegasusForConditionalGeneration": 0,
}
"""Classes whose tables are embeddings, and the rows of each before position 0."""
COMPUTED = {"M2M100ForConditionalGeneration": PADDING + 1, "NllbMoeForConditionalGeneration": PADDING + 1}
"""Classes that compute their sinusoids, counted from the padding id + 1."""
OPEN = [*TABLES, *COMPUTED]


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny random model of the class `name`, its decoder with half the heads of its encoder."""
    shape = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2}
    tokens = {"eos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": 3}
    return tiny_model(name, meta=False, seed=seed, **{**shape, **tokens, **changes})


def words(batch: int, length: int, seed: int = 1) -> Tensor:
    """Return random token ids [batch, length] without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, TINY_VOCABULARY, (batch, length), generator=generator)


SOURCE, TARGET = words(2, 20), words(2, 12, seed=2)


def logits(model: Any, source: Tensor = SOURCE, target: Tensor = TARGET, **kwargs: Any) -> Tensor:
    """Return the logits [B, Q, V] of `target` behind `source`, all of it seen unless a mask says otherwise."""
    kwargs.setdefault("attention_mask", torch.ones_like(source))
    with torch.no_grad():
        return model(input_ids=source, decoder_input_ids=target, **kwargs).logits


def stepwise(
    model: Any, source: Tensor = SOURCE, target: Tensor = TARGET, sizes: tuple[int, ...] = (5, 1, 1)
) -> Tensor:
    """Return the logits of `target` fed in pieces of these sizes, and the rest at the end, through the cache."""
    cuts = [0, *torch.tensor(sizes).cumsum(0).tolist(), target.shape[1]]
    mask = torch.ones_like(source)
    with torch.no_grad():
        encoded, cache, parts = model.get_encoder()(input_ids=source, attention_mask=mask), None, []
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            out = model(
                encoder_outputs=encoded,
                attention_mask=mask,
                decoder_input_ids=target[:, start:stop],
                **with_cache(model, cache),
                use_cache=True,
            )
            cache = cache_in(out)
            parts.append(out.logits)
    return torch.cat(parts, dim=1)
