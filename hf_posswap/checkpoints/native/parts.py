"""The weights of a transformer by their role, whatever names its class gives them.

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
    """One layer: attention and MLP, each with its norm, which comes before or after it.

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
class TransformerWeights:
    """All weights of one model without its position mechanism.

    Attributes:
        token_embedding: [V, E].
        types: the token type embedding, or None.
        embedding_norm: the norm on the embeddings, or None.
        layers: in order.
        final_norm: the norm after the last layer, or None.
        pooler: the Linear of the pooler, or None.
        head: of the language model, by role ("decoder", "dense", "norm"); empty for a base model.
        shape: config values under the names that most classes share.
    """

    token_embedding: Affine
    types: Affine | None
    embedding_norm: Affine | None
    layers: tuple[Layer, ...]
    final_norm: Affine | None
    pooler: Affine | None
    head: dict[str, Affine]
    shape: dict[str, Any]


@dataclass(frozen=True)
class Blueprint:
    """A stock model to build.

    Attributes:
        model_class: of transformers.
        config: of the model.
        weights: its whole state dict.
        limit: its longest input in tokens; None: no limit.
    """

    model_class: Any
    config: Any
    weights: Weights
    limit: int | None = None


def affine(state: Weights, path: str, *, transposed: bool = False) -> Affine:
    """Return the weight and the bias at `path` of a state dict; `transposed`: GPT-2's Conv1D has them [in, out].

    A missing bias is zeros, as the class computes it.
    """
    weight = state[f"{path}.weight"]
    weight = weight.T if transposed else weight
    bias = state.get(f"{path}.bias")
    return {"weight": weight, "bias": weight.new_zeros(weight.shape[0]) if bias is None else bias}


def scaled(module: Affine, factor: float) -> Affine:
    """Return `module` with its output times `factor`."""
    return module if factor == 1.0 else {name: tensor * factor for name, tensor in module.items()}


def rows(module: Affine, first: int, count: int) -> Affine:
    """Return `count` outputs of `module` from `first` on."""
    return {name: tensor[first : first + count] for name, tensor in module.items()}


def by_head(layer: Layer, heads: int) -> Affine:
    """Return query, key and value as one Linear [3 H D, E] whose rows are q, k and v of each head in turn."""
    joined = {}
    for name in ("weight", "bias"):
        each = [
            module[name].unflatten(0, (heads, -1)) for module in (layer.query, layer.key, layer.value)
        ]  # [H, D, ...]
        joined[name] = torch.stack(each, dim=1).flatten(0, 2)
    return joined


def named(modules: dict[str, Affine | None]) -> Weights:
    """Return a state dict with each module's weights under its path; None is left out."""
    return {
        f"{path}.{weight_or_bias}": t
        for path, module in modules.items()
        if module is not None
        for weight_or_bias, t in module.items()
    }


def refuse(reason: str) -> None:
    """Raise the reason why a conversion would not be exact.

    Raises:
        UnsupportedSwapError: always.
    """
    raise UnsupportedSwapError(reason)
