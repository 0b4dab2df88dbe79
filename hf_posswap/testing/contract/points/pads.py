"""Where the tokens of a padded row stand without position ids: where its stock class would have them.

The oracle is the row without its padding, told the positions that the stock class counts (`tests/families` proves that
it counts as its family says); where the swap is what the model had, the stock class itself on the padded row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posswap.testing.contract.checks import check_same
from hf_posswap.testing.contract.models import PADDING
from hf_posswap.testing.contract.pairs import Pair, with_cache, words
from hf_posswap.testing.contract.point import not_convolved, placed, point

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PADS = {"left": range(5), "inside": range(6, 10), "right": range(15, 20), "all": (0, 1, 4, 5, 9, 10, 11, 18, 19)}
"""Which of the 20 tokens of the second row are padding."""


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


def read(pair: Pair, model: PreTrainedModel, ids: Tensor, mask: Tensor, **kwargs: object) -> Tensor:
    """Return the logits of the second row: of its real tokens, or of all that the decoder says behind an encoder."""
    actual = pair.logits(model, ids, attention_mask=mask, **kwargs)[-1]
    return actual if pair.stack == "encoder" else actual[mask[-1].bool()]


@point(placed, not_convolved, parameter="where", values=tuple(PADS), few=True, of_stock=True)
def tokens_between_padding_stand_where_the_stock_class_has_them(pair: Pair, where: str) -> None:
    """Tokens between padding, without position ids, stand where the stock class has them."""
    (ids, mask), model = padded(where), pair.specimen()
    actual, shown = read(pair, model, ids, mask), mask[1].bool()
    at = positions_of_stock(pair.at.source_for(pair.scheme), shown)[shown][None] + pair.at.first_position
    position_ids = torch.arange(20).repeat(2, 1) + pair.at.first_position
    position_ids[1, shown] = at[0]
    meaning = "the logits with position ids that say so"
    check_same(actual, read(pair, model, ids, mask, position_ids=position_ids), pair.noise, meaning)
    if where in ("left", "right") or not pair.limits.sees_places:
        alone = ids[1:, shown]
        expected = read(pair, model, alone, torch.ones_like(alone), position_ids=at)
        check_same(actual, expected, pair.noise, "the logits of the row without its padding")
    if pair.identity:
        check_same(actual, read(pair, pair.native(), ids, mask), pair.noise, "the logits of the stock class")


@point(
    lambda pair: pair.placed and pair.cached, parameter="kind", values=("dynamic", "static"), few=True, of_stock=True
)
def they_stand_there_in_steps_through_a_cache_too(pair: Pair, kind: str) -> None:
    """Tokens between padding stand there in steps through a cache too."""
    if pair.tabled or pair.stack or pair.at.position_source == "input_ids":
        return  # code of the stock class counts, which forgets the padding of a cached prompt
    (ids, mask), model = padded("all"), pair.specimen()
    cache, chunks = pair.cache(kind, model.config), []
    for start, stop in ((0, 12), (12, 13), (13, 20)):
        chunks.append(pair.logits(model, ids[:, start:stop], attention_mask=mask[:, :stop], **with_cache(model, cache)))
    actual, whole = torch.cat(chunks, dim=1), pair.logits(model, ids, attention_mask=mask)
    check_same(actual[mask.bool()], whole[mask.bool()], pair.noise, "the logits of one forward")
