"""Attention scores by distance while a model reads texts, the target for fitting a bias or a rotation by distance.

They include the effect of the model's own positions, a learned table or a rotation of queries and keys; also here: what
a fit to them requires of the model and the texts, and the weight of each distance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posswap.errors import DataError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families.sites import Sites, Stack, TokenTable
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.apply.patch_model import patched
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.sites.attention.edits import AddMechanism, PatchAttention
from hf_posswap.patching.sites.attention.plan import ALTERING
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.common.bias import NEGLIGIBLE
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.schemes.sum import Sum, SumMechanism, native
from hf_posswap.search.fitness import TokenRows, evaluating, token_rows
from hf_posswap.text.tokens import check_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WITH_SCORES = native() + Alibi()
"""A swap that keeps the model's own positions, a table or a rotation, and gives access to the scores."""
_EVEN = 0.05
"""Share of the distances' weights that is uniform; the rest is proportional to the attention paid to each."""


def check_base(
    model: PreTrainedModel, scheme: Scheme, owner: str, *, table_only: bool = False, runs: bool = True
) -> Sites:
    """Return the sites of `model`, whose positions a fit can measure, and which can be swapped to `scheme`.

    Its positions are a learned table or a rotation of queries and keys, and nothing else.

    Args:
        model: unswapped.
        scheme: to fit.
        owner: the function of which errors speak.
        table_only: whether the positions must be a table.
        runs: whether the model is run now, for which it needs its weights; False: they may be on meta.

    Raises:
        UnsupportedSwapError: the model has other positions, several mechanisms, several stacks, or layers that share
            weights; its attention changes scores after they are computed, or cannot be patched.
        UnsupportedModelError: no family describes it, or its weights are on meta.
        AlreadyPatchedError: it carries a swap.
    """
    plan = plan_swap(model, scheme)
    sites, name = plan.sites, type(model).__name__
    if len(sites.stacks) > 1 or model.config.is_encoder_decoder:
        raise UnsupportedSwapError(f"{owner} fits models of one stack, and {name} is an encoder and a decoder.")
    _refuse_positions(sites.main, plan.record.relative is not None, name, owner, table_only=table_only)
    if sites.main.spec.layers_share and len(sites.main.attention) < model.config.num_hidden_layers:
        raise UnsupportedSwapError(shared_layers(name))
    modules = [model.get_submodule(path) for path in sites.main.attention]
    altering = [key for key in ALTERING if any(getattr(module, key, None) is not None for module in modules)]
    if altering:
        raise UnsupportedSwapError(
            f"{owner} fits a bias to a difference of attention scores, and {name} changes its scores after that "
            f"({altering[0]}), so the bias would have another effect. What works: models without logit soft-capping "
            "and attention sinks."
        )
    if runs and any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError(f"{owner} runs the model, and its weights are on meta: load it with its weights.")
    plan_swap(model, WITH_SCORES)
    return sites


def _refuse_positions(stack: Stack, has_relative: bool, name: str, owner: str, *, table_only: bool) -> None:
    """Refuse a `stack` whose positions are not one learned table or, unless `table_only`, one rotation."""
    inside, has_learned_table = stack.inside, isinstance(stack.table, TokenTable) and not stack.table.computed
    rotates = bool(stack.rotary) if inside is None else inside["name"] == "rope"
    has_others = inside is not None or bool(stack.rotary) or has_relative
    is_one_table = has_learned_table and not has_others
    is_one_rotation = stack.table is None and rotates and not has_relative
    if is_one_table or (is_one_rotation and not table_only):
        return
    works = "GPT-2, OPT, BERT, RoBERTa and similar models"
    if is_one_rotation:
        raise UnsupportedSwapError(
            f"{owner} fits a rotation to a learned position table, and {name} has no table: it rotates queries and "
            f"keys itself, and a swap to another rotation needs no such fit. What works: {works}; for {name}, alibi "
            "and t5, whose bias fit_bias fits to its rotation."
        )
    if has_learned_table:
        positions = "a table and other positions in addition to it"
    elif stack.table is not None:
        positions = "a table that is computed, not learned"
    else:
        positions = "neither" if inside is None else f"{inside['name']}, a bias of its own"
    wanted = "a learned position table" if table_only else "a learned position table or a rotation of queries and keys"
    more = "" if table_only else ", and models that rotate: Llama, Mistral, Qwen, Gemma 3, GPT-NeoX, GPT-J"
    raise UnsupportedSwapError(
        f"{owner} fits to the effect of {wanted}, and {name} has {positions}. What works: {works}{more}."
    )


def shared_layers(name: str) -> str:
    """Return the error message for a model of class `name` whose layers do not run exactly once each."""
    return (
        f"the attention layers of {name} do not run exactly once per forward, so their scores cannot be attributed: "
        "layers that share weights share one bias."
    )


def check_rows(tokens: TokenRows, model: PreTrainedModel, sites: Sites) -> list[np.ndarray]:
    """Return `tokens` as rows of token ids within the original length of `model`.

    Raises:
        DataError: they are not rows of the model's token ids, too long, padded, or all too short to compare.
    """
    rows, length = token_rows(tokens), sites.geometry.original_length
    for index, row in enumerate(rows):
        check_token_ids(model, row)
        if len(row) > length:
            raise DataError(
                f"tokens[{index}] has {len(row)} tokens, and the model's positions end at {length}; cut it."
            )
        padding = sites.main.padding_id
        if padding is not None and (row == padding).any():
            raise DataError(f"tokens[{index}] holds padding (id {padding}), which positions skip; leave it out.")
    if max(map(len, rows)) < 2:
        raise DataError("tokens has only rows of one token, and a fit compares two keys of a query: give longer rows.")
    return rows


def distances_of(geometry: Geometry, longest: int) -> Tensor:
    """Return the distances, query minus key, of the pairs in a row of `longest` tokens, [N], ascending.

    Example:
        >>> distances_of(Geometry(8, 1, 1, 8, 1, 16, causal=False), 3)
        tensor([-2, -1,  0,  1,  2])
    """
    return torch.arange(0 if geometry.causal else 1 - longest, longest, device="cpu")


def read_watched(
    model: PreTrainedModel,
    others: Mechanism,
    inside: dict[int, Mechanism],
    geometry: Geometry,
    rows: Sequence[np.ndarray],
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
    path = next(edit.path for edit in applied_swap(model).plan.edits if isinstance(edit, AddMechanism))
    original = model.get_submodule(path)
    acting = _ByLayer([inside.get(layer, others) for layer in range(geometry.num_layers)]).to(model.device)
    with evaluating(model), torch.no_grad():
        try:
            model.set_submodule(path, acting)
            for row in rows:
                ids = torch.from_numpy(row.astype(np.int64))[None].to(model.device)
                plain = {"use_cache": False} if geometry.causal else {}
                with suppress(_ForwardEnded):
                    model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), **plain)
        finally:
            model.set_submodule(path, original)
    if {watch.runs for watch in acting.modules() if isinstance(watch, LayerWatch)} != {len(rows)}:
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
    seen = pairs_at(scores.shape[-1], distances, scores.device)
    means = (scores * seen).sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True)
    return sums_at(distances, (scores - means) * seen)


def pairs_at(length: int, distances: Tensor, device: torch.device) -> Tensor:
    """Return which query-key pairs are at one of the consecutive `distances` [N], bool [L, L]."""
    positions = torch.arange(length, device=device)
    apart = positions[:, None] - positions
    return (apart >= int(distances[0])) & (apart <= int(distances[-1]))


def sums_at(distances: Tensor, values: Tensor) -> Tensor:
    """Return the sums of `values` [..., L, L], query by key, at each of the consecutive `distances`, [..., N].

    Distances that the text does not have sum to 0.

    Example:
        >>> sums_at(torch.arange(-1, 3), torch.tensor([[1.0, 2.0], [4.0, 8.0]])).tolist()
        [2.0, 9.0, 4.0, 0.0]
    """
    length, first, last = values.shape[-1], int(distances[0]), int(distances[-1])
    # with the keys reversed, and each row longer by one than those it is read as, distances lie in columns
    padded = functional.pad(values.flip(-1), (0, length)).flatten(-2)
    sums = padded[..., : length * (2 * length - 1)].unflatten(-1, (length, -1)).sum(dim=-2)  # of 1 - L to L - 1
    begin, end = max(first, 1 - length), min(last, length - 1)
    return functional.pad(sums[..., begin + length - 1 : end + length], (begin - first, last - end))


class _ByLayer(Mechanism):
    """Dispatches each layer to its own mechanism."""

    def __init__(self, layers: Sequence[Mechanism]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def for_layer(self, layer: int) -> Mechanism:
        mechanism = self.layers[layer]
        assert isinstance(mechanism, Mechanism)
        return mechanism


class _ForwardEnded(Exception):  # noqa: N818
    """Ends a forward after the last layer that is read."""


class LayerWatch(Mechanism):
    """Observes the queries and keys of one layer without acting on them; subclasses define what is recorded.

    Args:
        causal: whether a query sees only its past.
        ends_forward: whether the forward may end here: no later layer is read.

    Attributes:
        reach: minimum and maximum distance of visible keys in the texts read so far; None before the first text.
    """

    watches = True

    def __init__(self, *, causal: bool, ends_forward: bool = False) -> None:
        super().__init__()
        self.runs = 0
        self.ends_forward = ends_forward
        self.causal = causal
        self.reach: tuple[int, int] | None = None

    def watch(self, query: Tensor, key: Tensor, scaling: float | None, mask: object, window: int | None) -> None:
        self.runs += 1
        length = query.shape[2]
        least, most = _band(length, mask, window, causal=self.causal)
        before = self.reach or (0, 0)
        self.reach = min(before[0], least), max(before[1], most)
        self.look(query[0], key[0], query.shape[-1] ** -0.5 if scaling is None else scaling)
        if self.ends_forward:
            raise _ForwardEnded

    def look(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Record the queries [H, L, D] and keys [G, L, D] of one text; a score is scaling q k."""
        raise NotImplementedError

    def sees(self, distances: Tensor) -> Tensor:
        """Return the mask of `distances` [N] at which a query of this layer sees a key, bool [N]."""
        assert self.reach is not None
        return (distances >= self.reach[0]) & (distances <= self.reach[1])


class _RotatedWatch(SumMechanism):
    """A rotation, and a `LayerWatch` that observes the rotated queries and keys."""

    watches = True

    def watch(self, query: Tensor, key: Tensor, scaling: float | None, mask: object, window: int | None) -> None:
        observer = self.terms[-1]
        assert isinstance(observer, LayerWatch)
        observer.watch(query, key, scaling, mask, window)


def _band(length: int, mask: object, window: int | None, *, causal: bool) -> tuple[int, int]:
    """Return the minimum and maximum distance at which a query of a text of `length` tokens sees a key.

    Raises:
        UnsupportedSwapError: the mask is not a tensor, does not depend only on the distance, or changes visible scores.
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
    if mask.dtype != torch.bool and bool((mask[..., :length].expand_as(seen)[seen] != 0).any()):
        raise UnsupportedSwapError(
            "a fit by distance needs layers whose mask only hides keys, and the mask of one layer also changes the "
            "scores of keys that it shows."
        )
    return least, most


class ProfileWatch(LayerWatch):
    """Sums the scores by distance, centred over the keys that each query sees."""

    def __init__(self, geometry: Geometry, longest: int, *, ends_forward: bool = False) -> None:
        super().__init__(causal=geometry.causal, ends_forward=ends_forward)
        self.distances = distances_of(geometry, longest)
        self.profile = torch.zeros(geometry.num_heads, len(self.distances), dtype=torch.float64, device="cpu")

    def look(self, query: Tensor, key: Tensor, scaling: float) -> None:
        if len(query) != len(self.profile):
            raise UnsupportedSwapError(
                f"one layer has {len(query)} heads where the config says {len(self.profile)}, and a fit needs as many "
                "in each layer."
            )
        share = len(query) // len(key)
        for head in range(len(query)):  # one at a time, because all pairs are materialized
            scores = (query[head].double() @ key[head // share].double().T) * scaling
            self.look_at_scores(head, scores, self.sees(self.distances))

    def look_at_scores(self, head: int, scores: Tensor, near: Tensor) -> None:
        """Record the scores of one head, [L, L], at the distances of `near`, bool [N]."""
        self.profile[head, near] += centred_sums(scores, self.distances[near]).cpu()


class BaseWatch(ProfileWatch):
    """Sums, in addition to the scores, the attention paid to each distance."""

    def __init__(self, geometry: Geometry, longest: int) -> None:
        super().__init__(geometry, longest)
        self.attention = torch.zeros_like(self.profile)

    def look_at_scores(self, head: int, scores: Tensor, near: Tensor) -> None:
        super().look_at_scores(head, scores, near)
        seen = pairs_at(len(scores), self.distances[near], scores.device)
        paid = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        self.attention[head, near] += sums_at(self.distances[near], paid).cpu()


def watch_base(base: PreTrainedModel, geometry: Geometry, rows: Sequence[np.ndarray]) -> dict[int, BaseWatch]:
    """Run the unswapped model `base` with its own positions on `rows`, and return the record of each layer.

    Layers that a swap does not reach, such as those without rotation in a model that rotates, have none.
    """
    longest = max(map(len, rows))
    with patched(base, WITH_SCORES):
        plan = applied_swap(base).plan
        layers = [edit.layer for edit in plan.edits if isinstance(edit, PatchAttention)]
        watches = {layer: BaseWatch(geometry, longest) for layer in layers}
        terms = plan.scheme.terms if isinstance(plan.scheme, Sum) else ()
        rotation = next((term for term in terms if isinstance(term, RotaryScheme)), None)
        inside: dict[int, Mechanism] = dict(watches)
        if rotation is not None:  # attention that rotates without a rotary module: the swap has taken the rotation over
            inside = {n: _RotatedWatch([rotation.mechanism(geometry), watch]) for n, watch in watches.items()}
        read_watched(base, Mechanism(), inside, geometry, rows)
    return watches


def inverse_of_distances(distances: Tensor, rows: Sequence[np.ndarray]) -> Tensor:
    """Return the matrix [N, N] that converts the sums by distance of a `ProfileWatch` to a function of distance.

    The function is the least-squares fit of scores by any function of the distance and a constant for each query: sums
    [H, N] times this matrix are [H, N], each row up to a constant.

    Args:
        distances: consecutive distances at which a query sees a key, [N].
        rows: the texts.
    """
    occurring = torch.zeros(len(distances), dtype=torch.float64)  # pairs at each distance
    shared = torch.zeros(len(distances), len(distances), dtype=torch.float64)  # over queries with both: 1 / their keys
    for length, times in Counter(map(len, rows)).items():
        keys = torch.arange(length)[:, None] - distances  # [L, N]
        seen = ((keys >= 0) & (keys < length)).double()
        occurring += times * seen.sum(dim=0)
        shared += times * (seen / seen.sum(dim=1, keepdim=True)).T @ seen
    return torch.linalg.pinv(occurring.diag() - shared, rtol=NEGLIGIBLE, hermitian=True)


def distance_weights(attention: Tensor) -> Tensor:
    """Return the weight of each distance in a fit, [N], with sum 1: mostly proportional to the attention [N].

    There are many far distances with little attention; the weights focus the fit on distances that matter to the model.

    Example:
        >>> distance_weights(torch.tensor([3.0, 1.0, 0.0, 0.0]))
        tensor([0.7250, 0.2500, 0.0125, 0.0125])
    """
    return (1 - _EVEN) * attention / attention.sum() + _EVEN / len(attention)
