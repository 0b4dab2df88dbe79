"""Positions of tokens that come without position ids: those that the stock class would have counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import PositionShapeError, UnsupportedSwapError
from hf_posswap.families.base import PositionSource


def check_fits(position_ids: Tensor, given: dict[str, Any]) -> None:
    """Check that `position_ids` are as many as the tokens among the arguments `given` by name.

    Raises:
        PositionShapeError: they are not.
    """
    tokens = _tokens(given)
    if tokens is None or tuple(position_ids.shape) in ((1, tokens.shape[1]), tuple(tokens.shape[:2])):
        return
    raise PositionShapeError(
        f"position_ids of shape {list(position_ids.shape)} were given for tokens of shape {list(tokens.shape[:2])}: "
        "give one for each token, or one row for all rows."
    )


def check_not_packed(name: str, position_ids: Tensor, given: dict[str, Any]) -> None:
    """Check that `position_ids` are not those of packed documents without a mask, for a class that knows none.

    transformers takes ids that begin anew, where there is no mask, for documents that do not see each other, and masks
    them so where a class passes the ids to it. A class without position ids does not.

    Raises:
        UnsupportedSwapError: they begin anew, and there is no mask.
    """
    tells = isinstance(given.get("attention_mask"), Tensor) or torch.compiler.is_compiling()
    if tells or torch.jit.is_tracing() or position_ids.shape[1] == 1 or not bool((position_ids.diff() <= 0).any()):
        return
    raise UnsupportedSwapError(
        f"position_ids that begin anew were given to {name} without an attention_mask. transformers takes such ids for "
        "packed documents, but this class makes its mask without them, so the documents would see each other. What "
        "works: one document in each row, padded; for one text whose ids begin anew "
        "attention_mask=torch.ones_like(input_ids)."
    )


def counted(source: PositionSource, padding_id: int | None, given: dict[str, Any], cache: Any) -> Tensor | None:
    """Return the positions [B, Q], from 0, that a stock class counts; -1 is a token that it does not count.

    None: every token stands right behind the last one, padding too.

    Args:
        source: what the class counts.
        padding_id: the token id that it does not count, where it counts input ids.
        given: arguments of the module that takes the input, by name.
        cache: that is among them, or None.
    """
    tokens = _tokens(given)
    if source == "arange" or tokens is None:
        return None
    length, past = tokens.shape[1], 0 if cache is None else cache.get_seq_length()
    index = torch.arange(length, device=tokens.device) + past  # [Q]
    if source == "input_ids":
        if given.get("input_ids") is None:  # embeddings have no padding id
            return None
        shown = tokens.ne(-1 if padding_id is None else padding_id)  # [B, Q]
        positions = shown.cumsum(dim=1) - 1 + past
    else:
        keys = _shown_keys(given.get("attention_mask"))  # [B, K]
        if keys is None or keys.shape[1] < length + (past if isinstance(past, int) else 0):
            return None
        shown = keys.index_select(1, index)
        positions = keys.cumsum(dim=1) - 1 if source == "mask" else _behind_padding(keys)
        positions = positions.index_select(1, index)
    positions = positions.masked_fill(~shown, -1)
    return None if _is_plain(positions, index) else positions


def _tokens(given: dict[str, Any]) -> Tensor | None:
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def _shown_keys(mask: Any) -> Tensor | None:
    """Return which keys a mask shows to any query, bool [B, K]; None: it does not say.

    Args:
        mask: [B, K], or [B, 1, Q, K] as `generate` makes it for a static cache, bool or added to the scores.
    """
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    if mask.dim() == 2:
        return mask.bool()
    shown = mask if mask.dtype == torch.bool else mask == 0
    return shown.any(dim=2)[:, 0]


def _behind_padding(keys: Tensor) -> Tensor:
    """Return the index of each key less those on the left that `keys` [B, K] does not show, [B, K]."""
    padding = (keys.cumsum(dim=1) == 0).sum(dim=1, keepdim=True)  # [B, 1]
    return torch.arange(keys.shape[1], device=keys.device)[None] - padding


def _is_plain(positions: Tensor, index: Tensor) -> bool:
    """Return whether all rows of a text may share one row of positions: its real tokens stand at `index` [Q].

    Steps of decoding are not looked at: to ask a GPU costs more than rows of their own.
    """
    if positions.shape[1] == 1 or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return bool(((positions == index) | (positions < 0)).all())
