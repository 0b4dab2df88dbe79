"""Attention scores by distance, as a model reads: what a bias that follows the distance alone can be fitted to."""

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
        and a key that the layer sees. A score is scaled, before any bias and mask.

    Raises:
        UnsupportedSwapError: layers that run more than once in a forward, or not at all.
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
    """Have the swapped `model` read each of `rows` from its start, with other mechanisms inside its attention.

    Args:
        model: swapped, with something inside its attention; it is left as it was.
        others: what acts in the layers that `inside` does not name.
        inside: layer to what acts in it: a mechanism, or a `LayerWatch`, which has none act.
        geometry: of the model.
        rows: token ids, one text each.

    Raises:
        UnsupportedSwapError: watched layers that run more than once in a forward, or not at all.
    """
    path = next(edit.path for edit in model._posswap.plan.edits if isinstance(edit, AddMechanism))
    own = model.get_submodule(path)
    with evaluating(model), torch.no_grad():
        try:
            model.set_submodule(path, _ByLayer([inside.get(layer, others) for layer in range(geometry.num_layers)]))
            for row in rows:
                ids = torch.from_numpy(row.astype(np.int64))[None].to(model.device)
                plain = {"use_cache": False} if geometry.causal else {}
                model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), **plain)
        finally:
            model.set_submodule(path, own)
    if {watch.runs for watch in inside.values() if isinstance(watch, LayerWatch)} != {len(rows)}:
        raise UnsupportedSwapError(shared_layers(type(model).__name__))


def centred_sums(scores: Tensor, distances: Tensor) -> Tensor:
    """Return the sums, by distance, of `scores` less their mean over the keys of each query.

    Args:
        scores: of one head, [..., L, L], float64.
        distances: [N], rising by one; pairs at others are not looked at.

    Returns:
        [..., N].

    Example:
        >>> centred_sums(torch.tensor([[5.0, 9.0], [1.0, 3.0]]), torch.arange(2)).tolist()
        [1.0, -1.0]
    """
    place, seen = pairs_of(scores.shape[-1], distances, scores.device)
    means = (scores * seen).sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True)
    return sums_at(place, (scores - means)[..., seen], len(distances))


def pairs_of(length: int, distances: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which pairs of a query and a key are at one of `distances`, bool [L, L], and for each at which, [P]."""
    at = torch.arange(length, device=device)
    place = at[:, None] - at - int(distances[0])
    seen = (place >= 0) & (place < len(distances))
    return place[seen], seen


def sums_at(place: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the sums [..., N] of `values` [..., P] that have the same `place` [P]."""
    return values.new_zeros(*values.shape[:-1], count).index_add_(-1, place, values)


class _ByLayer(Mechanism):
    """Has each layer do with its own mechanism."""

    def __init__(self, layers: Sequence[Mechanism]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def for_layer(self, layer: int) -> Mechanism:
        found = self.layers[layer]
        assert isinstance(found, Mechanism)
        return found


class LayerWatch(Mechanism):
    """Looks at what the scores of one layer are made of, and has no mechanism act there: a subclass says at what.

    Attributes:
        reach: the least and the most distance of a key that a query sees, as far as the texts show; None: not yet read.
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
        """Look at the queries [H, L, D] and keys [G, L, D] of one text; a score is scaling q k."""
        raise NotImplementedError

    def sees(self, distances: Tensor) -> Tensor:
        """Return at which of `distances` [N] a query of this layer sees a key, bool [N]."""
        assert self.reach is not None
        return (distances >= self.reach[0]) & (distances <= self.reach[1])


def _band(length: int, mask: Any, window: int | None, *, causal: bool) -> tuple[int, int]:
    """Return the least and the most distance at which a query of a text of `length` tokens sees a key.

    Raises:
        UnsupportedSwapError: the mask is no tensor, or is not of the distance alone.
    """
    at = torch.arange(length, device=mask.device if isinstance(mask, Tensor) else "cpu")
    distance = at[:, None] - at
    least, most = (0 if causal else 1 - length), length - 1
    if window is not None:
        least, most = max(least, 1 - window), min(most, window - 1)
    if mask is None:
        return least, most
    if not isinstance(mask, Tensor):
        raise UnsupportedSwapError(
            f"a fit counts the pairs that each layer sees, and a {type(mask).__name__} does not tell them: use "
            "model.set_attn_implementation('sdpa')."
        )
    seen = mask[..., :length] if mask.dtype == torch.bool else mask[..., :length] > torch.finfo(mask.dtype).min / 2
    seen = (
        seen.expand(*seen.shape[:-2], length, length)
        if seen.ndim == 4
        else seen[:, None, None].expand(-1, 1, length, -1)
    )
    here = distance[seen[0, 0]]
    least, most = max(least, int(here.min())), min(most, int(here.max()))
    if not bool((seen == ((distance >= least) & (distance <= most))).all()):
        raise UnsupportedSwapError(
            "a fit by distance needs layers in which a query sees all keys up to a distance, and the mask of one is "
            "another."
        )
    return least, most


class ProfileWatch(LayerWatch):
    """Adds up what scores are less their mean over the keys that each query sees, by distance."""

    def __init__(self, geometry: Geometry, longest: int) -> None:
        super().__init__(causal=geometry.causal)
        self.distances = distances_of(geometry, longest)
        self.profile = torch.zeros(geometry.num_heads, len(self.distances), dtype=torch.float64, device="cpu")

    def look(self, query: Tensor, key: Tensor, scaling: float) -> None:
        share = len(query) // len(key)
        for head in range(len(query)):  # one at a time: all pairs are held
            scores = (query[head].double() @ key[head // share].double().T) * scaling
            self.look_at_scores(head, scores, self.sees(self.distances))

    def look_at_scores(self, head: int, scores: Tensor, near: Tensor) -> None:
        """Look at the scores of one head, [L, L], at the distances of `near`, bool [N]."""
        self.profile[head, near] += centred_sums(scores, self.distances[near]).cpu()
