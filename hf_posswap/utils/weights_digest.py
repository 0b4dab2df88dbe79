"""A digest of a model's weights: what tells one base from another, wherever they were read from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn


def weights_digest(model: nn.Module) -> str:
    """Return a digest of every byte of every weight and persistent buffer of `model`, with names, dtypes and shapes.

    A sample would be quicker, and blind where it matters: one row of an embedding, one expert of many. All of it takes
    about a second a GB and core, once, before hours of work; and what is in memory is what is worked on, whether it
    came from a folder, the Hub's newest commit, or an adapter on another base.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> before = weights_digest(one)
        >>> before == weights_digest(one), before == weights_digest(other)
        (True, False)
    """
    return state_digest(model.state_dict())


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the digest that `weights_digest` returns of a model with this state dict."""
    whole = hashlib.sha256()
    with ThreadPoolExecutor() as threads:
        for (name, tensor), digest in zip(state.items(), threads.map(_digest, state.values()), strict=True):
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}\n".encode())
    return whole.hexdigest()[:16]


def _digest(tensor: Tensor) -> str:
    tensor_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(tensor_bytes.numpy().data).hexdigest()
