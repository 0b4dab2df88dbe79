"""Objects that an operator of a compiled graph looks up by a number in a tensor, since it takes only tensors."""

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
    """Return a tensor [] by which `numbered` finds `owner` while it is alive; a copy of it needs its own number.

    Example:
        >>> class Owner: ...
        >>> owner = Owner()
        >>> numbered(number(owner)) is owner
        True
    """
    identifier = next(_NUMBERS)
    _OWNERS[identifier] = owner
    with without_fake_mode(), torch.inference_mode(False):
        return torch.tensor(identifier, device="cpu")


def numbered(tensor: Tensor) -> Any:
    """Return the object that `number` created `tensor` for."""
    return _OWNERS[int(tensor)]
