"""Tests on the model itself that a packing isolates or connects the right tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.errors import DataError
from hf_posswap.training.data.build import TokenData
from hf_posswap.training.data.windows import Collate, TokenWindows
from hf_posswap.utils.devices import evaluating

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_AROUND = 32  # tokens on each side of the border between two pieces
_TRIES = 256
_NOISE = 1e-5


def prove_packing(model: PreTrainedModel, data: TokenData) -> None:
    """Check on the model that attention crosses only the borders that it should, and that positions have an effect.

    Changes one token before the border between two pieces and compares the logits; then removes the positions or the
    neighbours. Cheap: a few dozen tokens.

    Args:
        model: the swapped model to train, on its device; dropout is off meanwhile.
        data: the training data, of which each length is checked; packings "none" and "concatenated" need no check.

    Raises:
        DataError: documents leak into one another, pieces do not attend to one another, or positions have no effect.
    """
    for windows in data.lengths.values():
        _prove(model, windows, data.collate)


def _prove(model: PreTrainedModel, windows: TokenWindows, collate: Collate) -> None:
    packing = windows.packing
    item_and_border = None if packing in ("none", "concatenated") else _border(windows)
    if item_and_border is None:
        return
    item, at = item_and_border
    start = max(0, at - _AROUND)
    border = at - start  # in the tokens around it
    batch = collate([{name: value[start : at + _AROUND] for name, value in windows[item].items() if name != "labels"}])
    batch = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    mask = batch.get("attention_mask")
    if mask is not None and mask.is_floating_point() and mask.dtype != model.dtype:
        raise DataError(
            f"packing {packing!r}: the mask of packed documents is {mask.dtype}, and {type(model).__name__} computes "
            f"in {model.dtype}: give build_data that dtype."
        )
    with evaluating(model), torch.no_grad():
        problem = (_leak_problem if packing == "documents" else _jump_problem)(model, batch, border)
    if problem is not None:
        raise DataError(f"packing {packing!r} on {type(model).__name__}: {problem} Use packing 'none'.")


def _leak_problem(model: PreTrainedModel, batch: dict[str, Any], border: int) -> str | None:
    """Return how the document after the border is computed differently than alone, or None."""
    packed_logits = _logits(model, batch)
    if _differ(_logits(model, _with_another_token(batch, border))[border:], packed_logits[border:], _NOISE):
        return (
            "a token of one document changes the logits of the next, so documents leak into one another: its forward "
            "takes no position_ids, or builds the mask without them."
        )
    ends = (batch["position_ids"][0, border:].diff() != 1).nonzero()
    end = border + int(ends[0]) + 1 if len(ends) else len(packed_logits)
    alone = _logits(model, {"input_ids": batch["input_ids"][:, border:end]})
    if _differ(alone, packed_logits[border:end], min(0.05, 1000 * torch.finfo(model.dtype).eps)):
        return "a document is computed differently than alone: its positions do not restart."
    return None


def _jump_problem(model: PreTrainedModel, batch: dict[str, object], border: int) -> str | None:
    """Return what is wrong with the jump of positions at the border, or None."""
    logits = _logits(model, batch)
    if not _differ(_logits(model, _with_another_token(batch, border))[border:], logits[border:], _NOISE):
        return (
            "text before the jump changes no logits after it: the model treats the pieces as packed documents, or "
            "attends to too few tokens back."
        )
    ordinary = {name: value for name, value in batch.items() if name != "position_ids"}
    if not _differ(_logits(model, ordinary), logits, _NOISE):
        return (
            "the positions that training gives have no effect: its forward ignores position_ids, or its scheme has no "
            "positions."
        )
    return None


def _logits(model: nn.Module, batch: dict[str, object]) -> Tensor:
    return model(**batch).logits[0].float()  # [L, V]


def _differ(actual: Tensor, expected: Tensor, noise: float) -> bool:
    return not bool((actual - expected).abs().max() <= noise * (1 + expected.abs().max()))  # a NaN differs


def _border(windows: TokenWindows) -> tuple[int, int] | None:
    """Return an item and the index in it where positions first jump, or None if no item has a jump."""
    for item in range(min(_TRIES, len(windows))):
        window = windows[item]
        is_consecutive = window["position_ids"].diff() == 1
        jumps = ~is_consecutive
        if windows.packing == "documents":  # padding is not the beginning of a document
            jumps = ~is_consecutive & torch.cat((is_consecutive[1:], is_consecutive.new_zeros(1)))
        if jumps.any():
            return item, int(jumps.nonzero()[0]) + 1
    return None


def _with_another_token(batch: dict[str, Any], border: int) -> dict[str, object]:
    ids = batch["input_ids"].clone()
    old_token = ids[0, border - 1]
    others = ids[0][ids[0] != old_token]
    ids[0, border - 1] = others[0] if len(others) else (old_token + 1) % 2
    return batch | {"input_ids": ids}
