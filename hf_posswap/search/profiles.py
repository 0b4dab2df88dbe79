"""Attention scores by distance while a model reads texts, the target for fitting a bias by distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.patch_model import patched
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.search.fitness import evaluating
from hf_posswap.search.tables import shared_layers


def distances_of(geometry: Geometry, longest: int) -> Tensor:
    """Return the distances, query minus key, of the pairs in a row of `longest` tokens, [N], ascending.

    Example:
        >>> distances_of(Geometry(8, 1, 1, 8, 1, 16, causal=False), 3)
        tensor([-2, -1,  0,  1,  2])
    """
    return torch.arange(0 if geometry.causal else 1 - longest, longest, device="cpu")


def score_profiles(
    model: Any, scheme: Scheme, geometry: Geometry, rows: Sequence[np.ndarray], watched: Sequence[int], biases: Any
) -> dict[int, Tensor]:
    """Return for each of the `watched` layers the sums by distance of its scores, centred for each query.

    Args:
        model: the unswapped model, which reads each of `rows` from its start; it is not changed.
        scheme: the scheme of the swap during the reading; its mechanism inside attention is disabled.
        geometry: the model's geometry.
        rows: token ids, one text each.
        watched: indices of the layers.
        biases: schemes by layer that act there instead of `scheme`.

    Returns:
        For each layer [H, N], float64 on the CPU, by `distances_of` the longest row; summed over all rows and all
        query-key pairs that the layer sees. Scores are scaled, before any bias and mask.

    Raises:
        UnsupportedSwapError: layers run more than once in a forward, or not at all.
    """
    longest = max(map(len, rows))
    watches = {layer: ProfileWatch(geometry, longest) for layer in watched}
    with patched(model, scheme):
        acting = {layer: bias.mechanism(geometry) for layer, bias in biases.items()}
        read_watched(model, Mechanism(), acting | watches, geometry, rows)
    return {layer: watch.profile for layer, watch in watches.items()}


def read_watched(
    model: Any, others: Mechanism, inside: dict[int, Any], geometry: Geometry, rows: Sequence[np.ndarray]
) -> None:
    """Run the swapped `model` on each of `rows` from its start, with other mechanisms inside its attention.

    Args:
        model: a swapped model with a mechanism inside its attention; it is not changed.
        others: the mechanism of layers that are not in `inside`.
        inside: mechanisms by layer; a `LayerWatch` only observes.
        geometry: the model's geometry.
        rows: token ids, one text each.

    Raises:
        UnsupportedSwapError: watched layers run more than once in a forward, or not at all.
    """
    path = next(edit.path for edit in model._posswap.plan.edits if isinstance(edit, AddMechanism))
    original = model.get_submodule(path)
    with evaluating(model), torch.no_grad():
        try:
            model.set_submodule(path, _ByLayer([inside.get(layer, others) for layer in range(geometry.num_layers)]))
            for row in rows:
                ids = torch.from_numpy(row.astype(np.int64))[None].to(model.device)
                plain = {"use_cache": False} if geometry.causal else {}
                model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), **plain)
        finally:
            model.set_submodule(path, original)
    if {watch.runs for watch in inside.values() if isinstance(watch, LayerWatch)} != {len(rows)}:
        raise UnsupportedSwapError(shared_layers(type(model).__name__))


def centred_sums(scores: Tensor, distances: Tensor) -> Tensor:
    """Return the sums by distance of `scores` minus their mean over the keys of each query.

    Args:
        scores: scores of one head, [..., L, L], float64.
        distances: consecutive distances, [N]; pairs at other distances are ignored.

    Returns:
        [..., N].

    Example:
        >>> centred_sums(torch.tensor([[5.0, 9.0], [1.0, 3.0]]), torch.arange(2)).tolist()
        [1.0, -1.0]
    """
    index, seen = pairs_of(scores.shape[-1], distances, scores.device)
    means = (scores * seen).sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True)
    return sums_at(index, (scores - means)[..., seen], len(distances))


def pairs_of(length: int, distances: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the index into `distances` of each query-key pair at one of them, [P], and their mask [L, L]."""
    positions = torch.arange(length, device=device)
    index = positions[:, None] - positions - int(distances[0])
    seen = (index >= 0) & (index < len(distances))
    return index[seen], seen


def sums_at(index: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the sums [..., N] of `values` [..., P] with the same `index` [P]."""
    return values.new_zeros(*values.shape[:-1], count).index_add_(-1, index, values)


class _ByLayer(Mechanism):
    """Dispatches each layer to its own mechanism."""

    def __init__(self, layers: Sequence[Mechanism]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def for_layer(self, layer: int) -> Mechanism:
        mechanism = self.layers[layer]
        assert isinstance(mechanism, Mechanism)
        return mechanism


class LayerWatch(Mechanism):
    """Observes the queries and keys of one layer without acting on them; subclasses define what is recorded.

    Attributes:
        reach: minimum and maximum distance of visible keys in the texts read so far; None before the first text.
    """

    watches = True

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.runs = 0
        self.causal = causal
        self.reach: tuple[int, int] | None = None

    def watch(self, query: Tensor, key: Tensor, scaling: float | None, mask: Any, window: int | None) -> None:
        self.runs += 1
        length = query.shape[2]
        least, most = _band(length, mask, window, causal=self.causal)
        before = self.reach or (0, 0)
        self.reach = min(before[0], least), max(before[1], most)
        self.look(query[0], key[0], query.shape[-1] ** -0.5 if scaling is None else scaling)

    def look(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Record the queries [H, L, D] and keys [G, L, D] of one text; a score is scaling q k."""
        raise NotImplementedError

    def sees(self, distances: Tensor) -> Tensor:
        """Return the mask of `distances` [N] at which a query of this layer sees a key, bool [N]."""
        assert self.reach is not None
        return (distances >= self.reach[0]) & (distances <= self.reach[1])


def _band(length: int, mask: Any, window: int | None, *, causal: bool) -> tuple[int, int]:
    """Return the minimum and maximum distance at which a query of a text of `length` tokens sees a key.

    Raises:
        UnsupportedSwapError: the mask is not a tensor, or does not depend only on the distance.
    """
    positions = torch.arange(length, device=mask.device if isinstance(mask, Tensor) else "cpu")
    distance = positions[:, None] - positions
    least, most = (0 if causal else 1 - length), length - 1
    if window is not None:
        least, most = max(least, 1 - window), min(most, window - 1)
    if mask is None:
        return least, most
    if not isinstance(mask, Tensor):
        raise UnsupportedSwapError(
            f"a fit needs the pairs that each layer sees, and a {type(mask).__name__} does not provide them: use "
            "model.set_attn_implementation('sdpa')."
        )
    seen = mask[..., :length] if mask.dtype == torch.bool else mask[..., :length] > torch.finfo(mask.dtype).min / 2
    seen = (
        seen.expand(*seen.shape[:-2], length, length)
        if seen.ndim == 4
        else seen[:, None, None].expand(-1, 1, length, -1)
    )
    visible = distance[seen[0, 0]]
    least, most = max(least, int(visible.min())), min(most, int(visible.max()))
    if not bool((seen == ((distance >= least) & (distance <= most))).all()):
        raise UnsupportedSwapError(
            "a fit by distance needs layers in which a query sees all keys up to a distance, and the mask of one layer "
            "is different."
        )
    return least, most


class ProfileWatch(LayerWatch):
    """Sums the scores by distance, centred over the keys that each query sees."""

    def __init__(self, geometry: Geometry, longest: int) -> None:
        super().__init__(causal=geometry.causal)
        self.distances = distances_of(geometry, longest)
        self.profile = torch.zeros(geometry.num_heads, len(self.distances), dtype=torch.float64, device="cpu")

    def look(self, query: Tensor, key: Tensor, scaling: float) -> None:
        share = len(query) // len(key)
        for head in range(len(query)):  # one at a time, because all pairs are materialized
            scores = (query[head].double() @ key[head // share].double().T) * scaling
            self.look_at_scores(head, scores, self.sees(self.distances))

    def look_at_scores(self, head: int, scores: Tensor, near: Tensor) -> None:
        """Record the scores of one head, [L, L], at the distances of `near`, bool [N]."""
        self.profile[head, near] += centred_sums(scores, self.distances[near]).cpu()
