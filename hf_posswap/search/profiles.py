"""Attention scores by distance, as a model reads: what a bias that follows the distance alone can be fitted to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.patch_model import patched
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.schemes.base import Mechanism, Scheme
from hf_posswap.search.fitness import evaluating


def distances_of(geometry: Geometry, longest: int) -> Tensor:
    """Return the distances, query less key, of the pairs in a row of `longest` tokens, [N], rising.

    Example:
        >>> distances_of(Geometry(8, 1, 1, 8, 1, 16, causal=False), 3)
        tensor([-2, -1,  0,  1,  2])
    """
    return torch.arange(0 if geometry.causal else 1 - longest, longest, device="cpu")


def score_profiles(
    model: Any, scheme: Scheme, geometry: Geometry, rows: Sequence[np.ndarray], watched: Sequence[int], biases: Any
) -> dict[int, Tensor]:
    """Return for each of the `watched` layers the sums, by distance, of its scores less their mean over each query's.

    Args:
        model: not swapped; it reads each of `rows` from its start, and is left as it was.
        scheme: of the swap that it reads in; what it has inside attention does not act.
        geometry: of the model.
        rows: token ids, one text each.
        watched: layers.
        biases: layer to the scheme that acts in it in place of `scheme`.

    Returns:
        By layer [H, N], float64 on the CPU, of `distances_of` the longest row; over all rows and all pairs of a query
        and a key that causality allows. A score is scaled, before any bias and mask.

    Raises:
        UnsupportedSwapError: layers that run more than once in a forward, or not at all.
    """
    longest = max(map(len, rows))
    with evaluating(model), torch.no_grad(), patched(model, scheme):
        edit = next(edit for edit in model._posswap.plan.edits if isinstance(edit, AddMechanism))
        carried = _ByLayer(geometry, watched, biases, longest)
        model.set_submodule(edit.path, carried)
        for row in rows:
            ids = torch.from_numpy(row.astype(np.int64))[None].to(model.device)
            plain = {"use_cache": False} if geometry.causal else {}
            model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), **plain)
        runs = {carried.watch_of(layer).runs for layer in watched}
        if runs != {len(rows)}:
            raise UnsupportedSwapError(
                f"the attention layers of {type(model).__name__} do not run once in a forward each, so that what their "
                "scores are cannot be told: layers that share their weights have one bias in common."
            )
        return {layer: carried.watch_of(layer).profile for layer in watched}


def normal_matrix(features: Tensor, distances: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sums over all queries of X X^T, X being `features` of the keys of a query less their mean over these.

    Args:
        features: functions of each distance, [F, N], float64.
        distances: [N], rising by one.
        lengths: of the rows, in tokens.

    Returns:
        [F, F].
    """
    before = torch.nn.functional.pad(features.cumsum(dim=1), (1, 0))  # [F, N + 1]
    zero, causal = int(-distances[0]), int(distances[0]) == 0
    total = features.new_zeros(len(features), len(features))
    for length, times in Counter(lengths).items():
        query = torch.arange(length)
        first = zero + (torch.zeros_like(query) if causal else query - length + 1)  # each query's nearest to -infinity
        last = zero + query
        number = last - first + 1  # keys of each query
        sums = before[:, last + 1] - before[:, first]  # [F, L]
        occurring = (length - distances.abs()).clamp(min=0).double()  # queries that have a key at each distance
        total += times * ((features * occurring) @ features.T - (sums / number) @ sums.T)
    return total


class _ByLayer(Mechanism):
    """Watches some layers, lets schemes act in others, and leaves the rest without positions."""

    def __init__(self, geometry: Geometry, watched: Sequence[int], biases: dict[int, Scheme], longest: int) -> None:
        super().__init__()
        inside = {layer: scheme.mechanism(geometry) for layer, scheme in biases.items()}
        inside |= {layer: _Watch(geometry, longest) for layer in watched}
        self.layers = nn.ModuleList([inside.get(layer, Mechanism()) for layer in range(geometry.num_layers)])

    def for_layer(self, layer: int) -> Mechanism:
        found = self.layers[layer]
        assert isinstance(found, Mechanism)
        return found

    def watch_of(self, layer: int) -> _Watch:
        found = self.layers[layer]
        assert isinstance(found, _Watch)
        return found


class _Watch(Mechanism):
    """Adds up what scores are less their mean over each query's, by distance."""

    watches = True

    def __init__(self, geometry: Geometry, longest: int) -> None:
        super().__init__()
        self.causal, self.runs = geometry.causal, 0
        self.distances = distances_of(geometry, longest)
        self.profile = torch.zeros(geometry.num_heads, len(self.distances), dtype=torch.float64, device="cpu")

    def watch(self, query: Tensor, key: Tensor, scaling: float | None) -> None:
        self.runs += 1
        share, length = query.shape[1] // key.shape[1], query.shape[2]
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        at = torch.arange(length, device=query.device)
        away = at[:, None] - at  # [L, L]
        seen = away >= 0 if self.causal else torch.ones_like(away, dtype=torch.bool)
        place = (away - int(self.distances[0]))[seen]
        for head in range(query.shape[1]):  # one at a time: all pairs are held
            scores = (query[0, head].double() @ key[0, head // share].double().T) * factor
            means = (scores * seen).sum(dim=1, keepdim=True) / seen.sum(dim=1, keepdim=True)
            centred = (scores - means)[seen]
            sums = torch.zeros_like(self.profile[head], device=query.device).index_add_(0, place, centred)
            self.profile[head] += sums.cpu()
