"""Copies of a model, in the ways that its users copy one."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch

WAYS = ("deepcopy", "torch.save")


def copied(model: Any, way: str) -> Any:
    """Return a copy of `model` made in one of `WAYS`."""
    if way == "deepcopy":
        return copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
