"""Where the tokens of a padded row stand without position ids: where its stock class would have them.

The oracle is the row without its padding, told the positions that the stock class counts (`tests/families` proves that
it counts as its family says); where the swap is what the model had, the stock class itself on the padded row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.models import PADDING
from tests.contract.pairs import Pair, gap, placed, words
from tests.contract.test_masks import not_convolved
from tests.stock import with_cache

pytestmark = pytest.mark.few
PADS = {"left": range(5), "inside": range(6, 10), "right": range(15, 20), "all": (0, 1, 4, 5, 9, 10, 11, 18, 19)}
"""Which of the 20 tokens of the second row are padding."""
SEES_PLACES = (
    *("mistral (sliding_window)", "gpt_neo", "longformer", "modernbert (an encoder of two types of layers)"),
    *("gemma3 (frequencies by layer type)", "llama4 (complex numbers, some layers still)"),
    *("gpt_oss (cos of half a head)", "t5gemma", "t5gemma2"),
    *("qwen3_5 (sections of a text tower)", "lfm2 (convolutions between)", "zamba2", "mpnet"),
)
"""Models that know a token's place in the row beside its position: by a window, a convolution, a state or a bias."""


def padded(where: str) -> tuple[Tensor, Tensor]:
    """Return ids and mask [2, 20], the second row padded."""
    ids, mask = words(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, list(PADS[where])] = 0
    return ids.masked_fill(mask == 0, PADDING), mask


def positions_of_stock(source: str, shown: Tensor) -> Tensor:
    """Return where the tokens of a row stand, [20], of which `shown` [20] are no padding."""
    index = torch.arange(len(shown))
    if source == "arange":
        return index
    first = int(shown.nonzero()[0])
    return index - first if source == "relative" else shown.cumsum(0) - 1


def read(pair: Pair, model: Any, ids: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
    """Return the logits of the second row: of its real tokens, or of all that the decoder says behind an encoder."""
    found = pair.logits(model, ids, attention_mask=mask, **kwargs)[-1]
    return found if pair.stack == "encoder" else found[mask[-1].bool()]


@placed
@not_convolved
@pytest.mark.parametrize("where", PADS)
def test_tokens_between_padding_stand_where_the_stock_class_has_them(pair: Pair, where: str) -> None:
    (ids, mask), model = padded(where), pair.specimen()
    found, shown = read(pair, model, ids, mask), mask[1].bool()
    at = positions_of_stock(pair.at.source_for(pair.scheme), shown)[shown][None] + pair.at.first_position
    told = torch.arange(20).repeat(2, 1) + pair.at.first_position
    told[1, shown] = at[0]
    assert gap(found, read(pair, model, ids, mask, position_ids=told)) < pair.noise
    if where in ("left", "right") or pair.model not in SEES_PLACES:
        alone = ids[1:, shown]
        assert gap(found, read(pair, model, alone, torch.ones_like(alone), position_ids=at)) < pair.noise
    if pair.identity:
        assert gap(found, read(pair, pair.native(), ids, mask)) < pair.noise


@pytest.mark.pairs(lambda pair: pair.placed and pair.cached)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_they_stand_there_in_steps_through_a_cache_too(pair: Pair, kind: str) -> None:
    if pair.tabled or pair.stack or pair.at.position_source == "input_ids":
        return  # code of the stock class counts, which forgets the padding of a cached prompt
    (ids, mask), model = padded("all"), pair.specimen()
    cache, parts = pair.cache(kind, model.config), []
    for start, stop in ((0, 12), (12, 13), (13, 20)):
        parts.append(pair.logits(model, ids[:, start:stop], attention_mask=mask[:, :stop], **with_cache(model, cache)))
    found, whole = torch.cat(parts, dim=1), pair.logits(model, ids, attention_mask=mask)
    assert gap(found[mask.bool()], whole[mask.bool()]) < pair.noise
