"""Attention scores by distance while a model reads texts, the target for fitting a bias or a rotation by distance.

They include the effect of the model's own positions, a learned table or a rotation of queries and keys; also here: what
a fit to them requires of the model and the texts, and the weight of each distance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
from hf_posswap.text.tokens import check_token_ids
from hf_posswap.training.search.fitness import TokenRows, token_rows
from hf_posswap.utils.devices import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WITH_SCORES = native() + Alibi()
"""A swap that keeps the model's own positions, a table or a rotation, and gives access to the scores."""
_EVEN = 0.05
"""Share of the distances' weights that is uniform; the rest is proportional to the attention paid to each."""
_QUERIES = 128
"""Queries of which all scores are computed at once."""
_SAMPLED = 8
"""Tokens of a text that show whether a model can resume after a block."""
_Output = Tensor | tuple[object, ...]
"""What a block of layers returns."""


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
    resumed: Sequence[_ResumedText] | None = None,
) -> None:
    """Run the swapped `model` on each of `rows` from its start, with other mechanisms inside its attention.

    Args:
        model: a swapped model with a mechanism inside its attention; it is not changed.
        others: the mechanism of layers that are not in `inside`.
        inside: mechanisms by layer; a `LayerWatch` only observes.
        geometry: the model's geometry.
        rows: token ids, one text each.
        resumed: for each of `rows`, the blocks that are not run again; None: all blocks run.

    Raises:
        UnsupportedSwapError: watched layers run more than once in a forward, or not at all.
    """
    path = next(edit.path for edit in applied_swap(model).plan.edits if isinstance(edit, AddMechanism))
    original = model.get_submodule(path)
    acting = _ByLayer([inside.get(layer, others) for layer in range(geometry.num_layers)]).to(model.device)
    with evaluating(model), torch.no_grad():
        try:
            model.set_submodule(path, acting)
            for row, text in zip(rows, resumed or [_ResumedText(()) for _ in rows], strict=True):
                ids = torch.from_numpy(row.astype(np.int64))[None].to(model.device)
                plain = {"use_cache": False} if geometry.causal else {}
                with suppress(_ForwardEnded), text.skipping():
                    model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), **plain)
        finally:
            model.set_submodule(path, original)
    if {watch.runs for watch in acting.modules() if isinstance(watch, LayerWatch)} != {len(rows)}:
        raise UnsupportedSwapError(shared_layers(type(model).__name__))


class LayerReader:
    """Reads texts with a swapped model up to one layer after another, and runs each block of layers once per text.

    A read ends at the attention of its layer, so the layer may then be changed: its new weights or mechanism act when
    the next read resumes there. Between two reads, the output of the last block is held for each text, [L, E].

    Blocks are skipped only if the queries and keys of all layers stay the same on a few tokens when all outputs but
    that one are NaN. Otherwise (blocks that also take keys or states of earlier ones) each read starts at the first.

    Args:
        model: as in `read_watched`.
        others: likewise.
        geometry: of the model.
        rows: token ids, one text each.
    """

    def __init__(
        self, model: PreTrainedModel, others: Mechanism, geometry: Geometry, rows: Sequence[np.ndarray]
    ) -> None:
        self.model, self.others, self.geometry, self.rows = model, others, geometry, rows
        self._blocks = _blocks_of(model)
        self._resumed = [_ResumedText(self._blocks) for _ in rows] if self._can_resume() else None

    def read(self, layer: int, watch: LayerWatch, acting: Mapping[int, Mechanism], count: int | None = None) -> None:
        """Run the model on the first `count` texts, or all, up to attention layer `layer`.

        Args:
            layer: not before that of the last call.
            watch: observes the layer; it ends the forward.
            acting: mechanisms of layers before it, as in `read_watched`.
            count: of the texts that are read; None: all.
        """
        resumed = None if self._resumed is None else self._resumed[:count]
        read_watched(self.model, self.others, {**acting, layer: watch}, self.geometry, self.rows[:count], resumed)

    def _can_resume(self) -> bool:
        samples, causal = [self.rows[0][:_SAMPLED], self.rows[-1][-_SAMPLED:]], self.geometry.causal
        edits = applied_swap(self.model).plan.edits
        whole = {edit.layer: StateWatch(causal=causal) for edit in edits if isinstance(edit, PatchAttention)}
        inside: dict[int, Mechanism] = {layer: _ActingWatch([self.others, watch]) for layer, watch in whole.items()}
        read_watched(self.model, self.others, inside, self.geometry, samples)
        resumed = [_ResumedText(self._blocks) for _ in samples]
        try:
            for layer in sorted(whole):
                watch = StateWatch(causal=causal, ends_forward=True)
                acting: dict[int, Mechanism] = {layer: _ActingWatch([self.others, watch])}
                read_watched(self.model, self.others, acting, self.geometry, samples, resumed)
                pairs = zip(whole[layer].states, watch.states, strict=True)
                if not all(torch.equal(*states) for pair in pairs for states in zip(*pair, strict=True)):
                    return False
        except Exception:  # the code of any model: it may miss anything that a skipped block did not do
            return False
        return True


def _blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of the lists, such as `model.layers`, that contain the patched attention, in their order."""
    lists: dict[str, nn.ModuleList] = {}
    for edit in applied_swap(model).plan.edits:
        names = edit.path.split(".") if isinstance(edit, PatchAttention) else []
        for path in (".".join(names[:count]) for count in range(1, len(names))):
            module = model.get_submodule(path)
            if isinstance(module, nn.ModuleList):
                lists[path] = module
                break
    return [block for blocks in lists.values() for block in blocks]


@dataclass(eq=False)
class _ResumedText:
    """Which blocks a model has run on one text, and the output of the last of them.

    Attributes:
        blocks: of the model, in the order of their runs.
        done: how many have run.
        output: of the last of these: hidden states [1, L, E], alone or before others.
    """

    blocks: Sequence[nn.Module]
    done: int = 0
    output: _Output = ()

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside the block, forwards skip what has run: its last output is returned again, and NaN for those before."""
        originals = [vars(block).get("forward") for block in self.blocks]
        for index, block in enumerate(self.blocks):
            vars(block)["forward"] = partial(self._run, index, block.forward)
        try:
            yield
        finally:
            for block, original in zip(self.blocks, originals, strict=True):
                del vars(block)["forward"]
                if original is not None:
                    vars(block)["forward"] = original

    def _run(self, index: int, original: Callable[..., _Output], *args: object, **kwargs: object) -> _Output:
        if index >= self.done:
            output = original(*args, **kwargs)
            self.done, self.output = index + 1, _map_hidden(output, Tensor.clone)
            return output
        is_last = index == self.done - 1
        return _map_hidden(self.output, Tensor.clone if is_last else _nan_like)  # a copy: a model may write into it


def _map_hidden(output: _Output, function: Callable[[Tensor], Tensor]) -> _Output:
    """Return a block's `output` with `function` of its hidden states, and NaN in the place of its other tensors."""
    if isinstance(output, Tensor):
        return function(output)
    hidden, *others = output
    if not isinstance(hidden, Tensor):
        raise TypeError(f"a block must return hidden states first, got a {type(hidden).__name__}.")
    return function(hidden), *(_nan_like(other) if isinstance(other, Tensor) else other for other in others)


def _nan_like(tensor: Tensor) -> Tensor:
    """Return NaN in the shape of `tensor`, which takes no memory."""
    dtype = tensor.dtype if tensor.is_floating_point() else torch.float32
    return torch.full((), torch.nan, dtype=dtype, device=tensor.device).expand_as(tensor)


def centred_sums(query: Tensor, key: Tensor, distances: Tensor) -> Tensor:
    """Return the sums by distance of the scores q k minus their mean over the keys of each query.

    The sum over i of q_i k_(i - d) is a correlation, which an FFT computes for all d without the scores, [L, L].

    Args:
        query: of one head or several, [..., L, D], float64.
        key: [..., L, D], float64.
        distances: consecutive distances, 0 among them, [N]; pairs at other distances are ignored.

    Returns:
        [..., N]; 0 at distances that the text does not have.

    Example:
        >>> key = torch.eye(2, dtype=torch.float64)
        >>> scores = torch.tensor([[5.0, 9.0], [1.0, 3.0]], dtype=torch.float64)  # query times that key
        >>> centred_sums(scores, key, torch.arange(3)).round(decimals=9).tolist()
        [1.0, -1.0, 0.0]
    """
    length, apart = query.shape[-2], distances.to(query.device)
    positions = torch.arange(length, device=query.device)
    first, last = (positions - apart[-1]).clamp(min=0), (positions - apart[0]).clamp(max=length - 1)  # keys of a query
    keys_before = functional.pad(key.cumsum(dim=-2), (0, 0, 1, 0))  # [..., L + 1, D]
    sums = (query * (keys_before[..., last + 1, :] - keys_before[..., first, :])).sum(dim=-1)
    means_before = functional.pad((sums / (last + 1 - first)).cumsum(dim=-1), (1, 0))  # [..., L + 1]
    begin, end = apart.clamp(0, length), (apart + length).clamp(0, length)  # queries with a key at each distance
    query_waves, key_waves = (torch.fft.rfft(x, n=2 * length, dim=-2) for x in (query, key))
    correlation = torch.fft.irfft((query_waves * key_waves.conj()).sum(dim=-1), n=2 * length)  # of d modulo 2 L
    centred = correlation[..., apart % (2 * length)] - (means_before[..., end] - means_before[..., begin])
    return centred.where(begin < end, 0.0)


def sums_at(distances: Tensor, values: Tensor, first: int = 0) -> Tensor:
    """Return the sums of `values` [..., Q, K], query by key, at each of the consecutive `distances`, [..., N].

    Distances that no pair has sum to 0.

    Args:
        distances: query minus key.
        values: of the pairs.
        first: distance of the first query from the first key.

    Example:
        >>> sums_at(torch.arange(-1, 3), torch.tensor([[1.0, 2.0], [4.0, 8.0]])).tolist()
        [2.0, 9.0, 4.0, 0.0]
    """
    queries, keys = values.shape[-2:]
    # with the keys reversed, and each row longer by one than those it is read as, distances lie in columns
    padded = functional.pad(values.flip(-1), (0, queries)).flatten(-2)
    columns = queries + keys - 1
    sums = padded[..., : queries * columns].unflatten(-1, (queries, columns)).sum(dim=-2)
    before = first - (keys - 1) - int(distances[0])  # distances before the first column, if positive
    after = int(distances[-1]) - (first + queries - 1)
    return functional.pad(sums, (before, after))


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


class StateWatch(LayerWatch):
    """Records the queries [H, L, D] and the keys [G, L, D] of each text, float64 on the CPU."""

    def __init__(self, *, causal: bool, ends_forward: bool = False) -> None:
        super().__init__(causal=causal, ends_forward=ends_forward)
        self.states: list[tuple[Tensor, Tensor]] = []
        self.scaling = 1.0

    def look(self, query: Tensor, key: Tensor, scaling: float) -> None:
        self.states.append((query.double().cpu(), key.double().cpu()))
        self.scaling = scaling


class _ActingWatch(SumMechanism):
    """A mechanism, and a `LayerWatch` that observes the queries and keys after its rotation."""

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
        for head in range(len(query)):  # one at a time, so that memory does not grow with them
            scaled_query = query[head].double() * scaling
            self.look_at_head(head, scaled_query, key[head // share].double(), self.sees(self.distances))

    def look_at_head(self, head: int, query: Tensor, key: Tensor, near: Tensor) -> None:
        """Record one head, whose scores are `query` times `key`, each [L, D], at the distances of `near`, bool [N]."""
        self.profile[head, near] += centred_sums(query, key, self.distances[near]).cpu()


class BaseWatch(ProfileWatch):
    """Sums, in addition to the scores, the attention paid to each distance."""

    def __init__(self, geometry: Geometry, longest: int) -> None:
        super().__init__(geometry, longest)
        self.attention = torch.zeros_like(self.profile)

    def look_at_head(self, head: int, query: Tensor, key: Tensor, near: Tensor) -> None:
        super().look_at_head(head, query, key, near)
        distances, length = self.distances[near], len(query)
        nearest, farthest = int(distances[0]), int(distances[-1])
        attention = torch.zeros(len(distances), dtype=query.dtype, device=query.device)
        for begin in range(0, length, _QUERIES):  # all pairs would not fit into a processor's cache
            end = min(begin + _QUERIES, length)
            low, high = max(0, begin - farthest), min(length, end - nearest)  # the keys that some of them see
            positions = torch.arange(low, high, device=query.device)
            apart = positions[begin - low : end - low, None] - positions
            hidden = (apart < nearest) | (apart > farthest)
            paid = (query[begin:end] @ key[low:high].T).masked_fill_(hidden, -torch.inf).softmax(dim=-1)
            attention += sums_at(distances, paid, begin - low)
        self.attention[head, near] += attention.cpu()


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
            inside = {n: _ActingWatch([rotation.mechanism(geometry), watch]) for n, watch in watches.items()}
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
