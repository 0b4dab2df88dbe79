"""Proof, on the model itself, that a packing does what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import DataError
from hf_posswap.training.data.build import TokenData
from hf_posswap.training.data.windows import Collate, TokenWindows

_AROUND = 32  # tokens on each side of the border between two pieces
_TRIES = 256
_NOISE = 1e-5


def prove_packing(model: Any, data: TokenData) -> None:
    """Check on the model that attention crosses what it should and nothing else, and that positions are in force.

    Changes one token before the border between two pieces, and looks which logits change; takes the positions away, or
    the neighbours. Cheap: a few dozen tokens.

    Args:
        model: that is to be trained, swapped, on its device; any dropout is off meanwhile.
        data: what it is to be trained on, of which each length is proved; packing "none" has nothing to prove.

    Raises:
        DataError: documents leak into one another, pieces do not see one another, or given positions have no effect.
    """
    for windows in data.lengths.values():
        _prove(model, windows, data.collate)


def _prove(model: Any, windows: TokenWindows, collate: Collate) -> None:
    packing = windows.packing
    found = None if packing == "none" else _border(windows)
    if found is None:
        return
    window, border = _around_border(windows, *found)
    batch = collate([window])
    batch = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    mask = batch.get("attention_mask")
    if mask is not None and mask.is_floating_point() and mask.dtype != model.dtype:
        raise DataError(
            f"packing {packing!r}: the mask of packed documents is {mask.dtype}, and {type(model).__name__} computes "
            f"in {model.dtype}: give build_data that dtype."
        )
    with _measuring(model):
        problem = (_not_apart if packing == "documents" else _not_jumping)(model, batch, border)
    if problem is not None:
        raise DataError(f"packing {packing!r} on {type(model).__name__}: {problem} Use packing 'none'.")


def _not_apart(model: Any, batch: dict[str, Any], border: int) -> str | None:
    """Return how the document after the border is not computed as if it were alone, or None."""
    given = _logits(model, batch)
    if _differ(_logits(model, _with_another_token(batch, border))[border:], given[border:], _NOISE):
        return (
            "a token of one document changes what the model says in the next, so documents leak into one another: its "
            "forward takes no position_ids, or makes the mask without them."
        )
    ends = (batch["position_ids"][0, border:].diff() != 1).nonzero()
    end = border + int(ends[0]) + 1 if len(ends) else len(given)
    alone = _logits(model, {"input_ids": batch["input_ids"][:, border:end]})
    if _differ(alone, given[border:end], min(0.05, 1000 * torch.finfo(model.dtype).eps)):
        return "a document is not computed as it is alone: positions do not begin anew with it."
    return None


def _not_jumping(model: Any, batch: dict[str, Any], border: int) -> str | None:
    """Return how the positions' jump before the border is not what it should be, or None."""
    given = _logits(model, batch)
    if not _differ(_logits(model, _with_another_token(batch, border))[border:], given[border:], _NOISE):
        return (
            "what stands before the jump changes nothing behind it: the model takes the pieces for packed documents, "
            "or reads so little text back."
        )
    ordinary = {name: value for name, value in batch.items() if name != "position_ids"}
    if not _differ(_logits(model, ordinary), given, _NOISE):
        return (
            "the positions that training gives have no effect: its forward ignores position_ids, or its scheme has no "
            "positions."
        )
    return None


def _logits(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(**batch).logits[0].float()  # [L, V]


def _differ(one: Tensor, other: Tensor, noise: float) -> bool:
    return bool((one - other).abs().max() > noise * (1 + other.abs().max()))


def _border(windows: TokenWindows) -> tuple[int, int] | None:
    """Return an item and the index in it where positions first jump, or None where no item has such a place."""
    for item in range(min(_TRIES, len(windows))):
        window = windows[item]
        along = window["position_ids"].diff() == 1
        steps = ~along
        if windows.packing == "documents":  # where a window is filled up, no document begins
            steps = ~along & torch.cat((along[1:], along.new_zeros(1)))
        if steps.any():
            return item, int(steps.nonzero()[0]) + 1
    return None


def _around_border(windows: TokenWindows, item: int, at: int) -> tuple[dict[str, Tensor], int]:
    """Return the tokens around index `at` of one item, and that index in them."""
    start = max(0, at - _AROUND)
    window = {name: value[start : at + _AROUND] for name, value in windows[item].items() if name != "labels"}
    return window, at - start


def _with_another_token(batch: dict[str, Any], border: int) -> dict[str, Any]:
    ids = batch["input_ids"].clone()
    before = ids[0, border - 1]
    others = ids[0][ids[0] != before]
    ids[0, border - 1] = others[0] if len(others) else (before + 1) % 2
    return batch | {"input_ids": ids}


@contextmanager
def _measuring(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
