"""Cached keys stand where they stood: behind right padding, behind ids that skip, behind holes in a prompt's mask.

What the swapped model says in one forward without a cache is the oracle, and where the swap is what the model had, the
stock class itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationMixin

from hf_posswap.testing.contract.checks import check, check_same
from hf_posswap.testing.contract.models import LENGTH, PADDING
from hf_posswap.testing.contract.pairs import HEARD, Pair, with_cache, words
from hf_posswap.testing.contract.point import point
from hf_posswap.testing.contract.points.masks import counted, first_position
from hf_posswap.testing.contract.points.running import check_same_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT, TOTAL = 12, 24
CACHES = ("dynamic", "static")


def decodes(pair: Pair) -> bool:
    """Return whether the pair continues a prompt through a cache, at positions that it is told."""
    return pair.tiny.generates and pair.cached and pair.placed


def models(pair: Pair) -> Iterator[PreTrainedModel]:
    """Yield the swapped model, and the stock one where the swap is what it has."""
    yield pair.specimen()
    if pair.identity and pair.takes("position_ids"):
        yield pair.native()


def fed(
    pair: Pair, model: PreTrainedModel, kind: str, ids: Tensor, mask: Tensor, at: Tensor, sizes: list[int]
) -> Tensor:
    """Return the logits of `ids` at the positions `at`, fed in pieces of `sizes` through a cache of this `kind`."""
    cache, start, actual = pair.cache(kind, model.config), 0, []
    for size in sizes:
        end = start + size
        actual.append(
            pair.logits(
                model,
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=at[:, start:end],
                **with_cache(model, cache),
            )  # fmt: skip
        )
        start = end
    return torch.cat(actual, dim=1)


@point(decodes, parameter="kind", values=CACHES, few=True, of_stock=True)
def steps_behind_a_right_padded_prompt_equal_the_unpadded_model(pair: Pair, kind: str) -> None:
    """Steps behind a right-padded prompt give the logits of the unpadded text."""
    ids, lengths = words(2, TOTAL), (PROMPT, 7)
    mask = torch.ones_like(ids)
    mask[1, lengths[1] : PROMPT] = 0
    ids[1, lengths[1] : PROMPT] = PADDING
    alone = torch.cat([ids[1:, : lengths[1]], ids[1:, PROMPT:]], dim=1)
    at = counted(pair, mask)
    actual = fed(pair, pair.specimen(), kind, ids, mask, at, [PROMPT, 1, 1, 5, 5])
    for model in models(pair):
        if pair.limits.sees_places:  # there the padding stands between: the oracle reads it at once
            expected = pair.logits(model, ids, attention_mask=mask, position_ids=at, use_cache=False)[1, PROMPT:]
        else:
            expected = pair.logits(model, alone)[0, lengths[1] :]
        check_same(actual[1, PROMPT:], expected, pair.noise, "the logits without padding")
        check_same(actual[0], pair.logits(model, ids[:1])[0], pair.noise, "the logits of the other row alone")


@point(decodes, parameter="kind", values=CACHES, few=True, of_stock=True)
def ids_that_skip_between_chunks_equal_one_forward_with_the_same_ids(pair: Pair, kind: str) -> None:
    """Position ids that skip between chunks give the logits of one forward with the same ids."""
    ids = words(2, 20)
    at = torch.tensor([[*range(8), *range(10, 15), *range(16, 23)], [*range(3, 12), *range(13, 24)]])
    at, mask = at + first_position(pair), torch.ones_like(ids)
    actual = fed(pair, pair.specimen(), kind, ids, mask, at, [8, 1, 4, 7])
    for model in models(pair):
        expected = pair.logits(model, ids, position_ids=at, use_cache=False)
        check_same(actual, expected, pair.noise, "the logits of one forward")


@point(decodes, parameter="beams", values=(1, 3), few=True, of_stock=True)
def a_prompt_with_a_hole_generates_through_a_cache_what_it_does_without(pair: Pair, beams: int) -> None:
    """A prompt with holes in its mask generates through a cache what it does without one."""
    prompt = words(2, 14)
    mask = torch.ones_like(prompt)
    mask[0, 5:9] = 0
    mask[1, :2] = 0
    prompt = prompt.masked_fill(mask == 0, PADDING)
    new = pair.consistent_length - 16 if pair.plan.cached_equals_full else LENGTH - 16
    kwargs = {"max_new_tokens": new, "do_sample": False, "num_beams": beams}
    model = pair.specimen()
    given = {"inputs": prompt, "attention_mask": mask}
    if pair.stack:  # the decoder's prompt; it begins as the model would by itself, or a token was added
        prompt[:, 0] = model.generation_config.decoder_start_token_id
        source = HEARD.expand(2, -1, -1) if pair.tiny.hears else words(2, 14)
        given = {"inputs": source, "decoder_input_ids": prompt, "decoder_attention_mask": mask}
    # of the mixin: Whisper's own splits sound into segments first
    actual, expected = (GenerationMixin.generate(model, use_cache=on, **given, **kwargs) for on in (True, False))
    check(actual.shape == (2, 14 + new), f"2 rows of {14 + new} tokens", tuple(actual.shape))
    check_same_texts(actual, expected, "the text without a cache")
