"""The weights of a transformer by what they do, whatever its class calls them.

Shapes: E hidden size, I inner size, V vocabulary, H heads, D head dim. Linear weights are [out, in], as nn.Linear has
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import UnsupportedSwapError

Affine = dict[str, Tensor]
"""The `weight` and `bias` of a Linear or a LayerNorm; an Embedding has a weight alone."""
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer: attention with its norm, MLP with its norm; the norms lie before or after, as `Parts` says.

    Attributes:
        query: [H D, E].
        key: [H D, E].
        value: [H D, E].
        out: [E, H D].
        attention_norm: [E].
        up: [I, E].
        down: [E, I].
        mlp_norm: [E].
    """

    query: Affine
    key: Affine
    value: Affine
    out: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    mlp_norm: Affine


@dataclass(frozen=True)
class Parts:
    """All weights of one model without its position mechanism.

    Attributes:
        words: the word embedding [V, E].
        types: the token type embedding, or None.
        embedding_norm: the norm on the embeddings, or None.
        layers: in order.
        final_norm: the norm after the last layer, or None.
        pooler: the Linear of the pooler, or None.
        head: of the language model, by role ("decoder", "dense", "norm"); empty for a base model.
        shape: config values under the names that most classes share.
    """

    words: Affine
    types: Affine | None
    embedding_norm: Affine | None
    layers: tuple[Layer, ...]
    final_norm: Affine | None
    pooler: Affine | None
    head: dict[str, Affine]
    shape: dict[str, Any]


@dataclass(frozen=True)
class Blueprint:
    """A stock model to be built.

    Attributes:
        model_class: of transformers.
        config: of the model.
        weights: its whole state dict.
        limit: tokens after which it ends; None: it has no end.
    """

    model_class: Any
    config: Any
    weights: Weights
    limit: int | None = None


def affine(state: Weights, path: str, *, transposed: bool = False) -> Affine:
    """Return the weight and the bias at `path` of a state dict; `transposed`: GPT-2's Conv1D has them [in, out].

    A bias that is not there is one of zeros, as the class computes it.
    """
    weight = state[f"{path}.weight"]
    weight = weight.T if transposed else weight
    bias = state.get(f"{path}.bias")
    return {"weight": weight, "bias": weight.new_zeros(weight.shape[0]) if bias is None else bias}


def scaled(part: Affine, factor: float) -> Affine:
    """Return `part` with its output times `factor`."""
    return part if factor == 1.0 else {name: tensor * factor for name, tensor in part.items()}


def rows(part: Affine, first: int, count: int) -> Affine:
    """Return `count` outputs of `part` from `first` on."""
    return {name: tensor[first : first + count] for name, tensor in part.items()}


def by_head(layer: Layer, heads: int) -> Affine:
    """Return query, key and value as one Linear [3 H D, E] whose rows are q, k and v of each head in turn."""
    joined = {}
    for name in ("weight", "bias"):
        each = [part[name].unflatten(0, (heads, -1)) for part in (layer.query, layer.key, layer.value)]  # [H, D, ...]
        joined[name] = torch.stack(each, dim=1).flatten(0, 2)
    return joined


def named(parts: dict[str, Affine | None]) -> Weights:
    """Return a state dict with each part under its path; None is left out."""
    return {f"{path}.{kind}": t for path, part in parts.items() if part is not None for kind, t in part.items()}


def refuse(reason: str) -> None:
    """Say why a conversion would not be exact.

    Raises:
        UnsupportedSwapError: always.
    """
    raise UnsupportedSwapError(reason)
