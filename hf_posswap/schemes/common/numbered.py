"""Objects that an operator of a compiled graph finds by a number in a tensor, as its arguments are tensors alone."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_fake import without_fake_mode

_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number(owner: Any) -> Tensor:
    """Return a tensor [] by which `numbered` finds `owner` as long as it lives; a copy of it needs a number of its own.

    Example:
        >>> class Owner: ...
        >>> owner = Owner()
        >>> numbered(number(owner)) is owner
        True
    """
    found = next(_NUMBERS)
    _OWNERS[found] = owner
    with without_fake_mode(), torch.inference_mode(False):
        return torch.tensor(found, device="cpu")


def numbered(tensor: Tensor) -> Any:
    """Return what `number` gave `tensor` for."""
    return _OWNERS[int(tensor)]
