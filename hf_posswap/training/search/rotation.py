"""Fitting a rotation to the effect of a learned table, before any training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_posswap.compat.peft_wrappers import is_adapted
from hf_posswap.compat.torch_modules import copy_module
from hf_posswap.compat.torch_tensors import is_plain
from hf_posswap.errors import NotPatchedError, SchemeError, UnsupportedSwapError
from hf_posswap.families.sites import Sites
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.apply.patch_model import unpatch_model
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.search.fitness import TokenRows
from hf_posswap.training.search.profiles import (
    BaseWatch,
    LayerReader,
    StateWatch,
    centred_sums,
    check_base,
    check_rows,
    distance_weights,
    inverse_of_distances,
    watch_base,
)
from hf_posswap.utils.progress import counted, reporter_for
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_posswap.schemes.base import Scheme

_OWNER = "fit_rotation"
_BEYOND = 0.2
"""Total weight of all distances beyond the table; those within it have weight 1."""
_RIDGE = 1e-4
"""Penalty on the squared amplitudes, so that waves that cancel within the table do not diverge beyond it."""
_MOST_BEYOND = 4096
"""Maximum number of evenly spaced distances beyond the table."""
_ALLOWED = 1e-3
"""Maximum relative error of queries and keys after the change of basis."""
_EXACT_ENOUGH = (torch.float32, torch.float64)
_RELATIVE = 1e-8
"""Directions with less than this share of the mean variance are treated as constant."""
_PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"))
_FUSED = ("c_attn",)  # queries, keys and values, concatenated


@dataclass(frozen=True, repr=False)
class RotationFit(ResultView):
    """The result of `fit_rotation`.

    Attributes:
        explained: for each layer and head, the share of the table's variance over distances that the rotation explains,
            with distances weighted by the attention paid to them; 1 is all.
        dropped: for each layer and head, the share of the squared content scores in the dimensions that now rotate,
            which is lost.
    """

    explained: tuple[tuple[float, ...], ...]
    dropped: tuple[tuple[float, ...], ...]

    def _repr_facts(self) -> dict[str, object]:
        explained, dropped = (np.asarray(values) for values in (self.explained, self.dropped))
        return {
            "layers": len(self.explained),
            "heads": explained.shape[-1],
            "mean_explained": float(explained.mean()),
            "min_explained": float(explained.min()),
            "mean_dropped": float(dropped.mean()),
        }

    def _html_rows(self) -> list[tuple[str, str]]:
        layers = zip(self.explained, self.dropped, strict=True)
        return [
            (f"layer {layer}", f"explained {np.mean(explained):.0%}, dropped {np.mean(dropped):.1e} (mean over heads)")
            for layer, (explained, dropped) in enumerate(layers)
        ]

    def __str__(self) -> str:
        explained, dropped = (np.asarray(values) for values in (self.explained, self.dropped))
        return (
            f"rotation fitted to the table in {explained.size} heads: it explains {explained.mean():.0%} of the "
            f"table's effect by distance (minimum {explained.min():.0%}), and loses {dropped.mean():.1e} of the "
            "squared content scores"
        )


@alone()
@torch.no_grad()
def fit_rotation(model: PreTrainedModel, tokens: TokenRows, *, progress: bool | None = None) -> RotationFit:
    """Fit the queries and keys of a model swapped from a learned table to a partial rotation to the table's effect.

    A swap alone rotates the first R of the D dimensions of each head, whatever they contain, and disables heads that
    attend by position. The fit gives a better start. For each layer and head:

    1. A change of basis, q' = M q and k' = M^-T k, which preserves every score, sorts the dimensions by their
       contribution to scores (`balanced_bases`) in ascending order: content stays in the D - R dimensions that do not
       rotate, where it is matched at any distance.
    2. The R rotating dimensions get constant queries and keys, whose rotated product is a bias

           b(d) = sum over pairs r of A_r cos(theta_r d - phi_r),

       fitted by least squares to the table's contribution to the scores at each distance d, weighted by the attention
       that the model with its table pays to d, and to a constant beyond the table. b is stored in the biases of the
       projections.

    Layers are fitted one after the other, so each corrects the residual of earlier layers. Afterwards queries and keys
    are ordinary weights, and training may move content into the rotating part. The fit changes weights:
    `unpatch_model`, `make_teacher` and saving an adapter refuse such a model. Call it before training, and after
    everything that needs the unswapped model.

    Args:
        model: a model swapped in this process from a learned table to a scheme that rotates a part of each head by
            fixed angles, `patch_model(model, "rope", partial=0.5)`, and not trained since. `centre_table(model)` before
            the swap keeps the mean of the table.
        tokens: rows of token ids, one text per row, without padding, each within the original length; a few thousand
            tokens are enough. The model reads all of them once with its table, and once layer by layer as these are
            fitted; a model whose layers also take keys or states of earlier ones, again up to each layer.
        progress: show a bar of the layers; None: in a notebook and on a terminal, unless HF_HUB_DISABLE_PROGRESS_BARS
            or `disable_progress_bar` of transformers turns bars off.

    Returns:
        The explained and dropped shares. The model is changed in place, and restored after an error.

    Raises:
        NotPatchedError: the model carries no swap, was loaded with it, or is fitted already, so that the table's effect
            is unknown.
        SchemeError: the scheme does not rotate by fixed angles, or rotates whole heads, which leaves no dimensions for
            content.
        UnsupportedSwapError: it had no learned table, several stacks, heads that share keys, projections that are not
            known, have no bias or are quantized, or weights of another dtype than float32 and float64.
        UnsupportedModelError: its weights are on meta.
        DataError: tokens are not rows of the model's token ids, too long, padded, or all too short to compare.
        ModelInUseError: a forward of the model is running, or another thread changes it.
        OptionError: `progress` is not True, False or None.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "rope", partial=0.5, max_length=64)
        >>> fit = fit_rotation(model, torch.arange(32).view(2, 16) % 11)
        >>> len(fit.explained), len(fit.explained[0])
        (2, 2)
    """
    reporter = reporter_for(progress)
    target = unwrap(model)
    scheme, base = _checked_scheme(target), unpatch_model(copy_module(target))
    sites = check_base(base, scheme, _OWNER, table_only=True)
    geometry, rows = sites.geometry, check_rows(tokens, base, sites)
    pairs = _pairs(target, sites)
    table = list(watch_base(base, geometry, rows).values())
    del base
    longest, reach = max(map(len, rows)), applied_swap(target).plan.max_length
    waves = [_Waves.of(scheme, geometry, watch, longest, reach) for watch in table]
    nears = {watch.reach: layer_waves.near for watch, layer_waves in zip(table, waves, strict=True)}
    inverses = {span: inverse_of_distances(near, rows) for span, near in nears.items()}  # layers of one reach share one
    path = next(edit.path for edit in applied_swap(target).plan.edits if isinstance(edit, AddMechanism))
    mechanism: Any = target.get_submodule(path)
    reader = LayerReader(target, mechanism, geometry, rows)
    before = [[projection.read() for projection in pair] for pair in pairs]
    layer_fits = []
    try:
        with counted(reporter, "fit_rotation: layers", len(pairs)) as count:
            for layer, pair in enumerate(pairs):
                seen, proof = (StateWatch(causal=geometry.causal, ends_forward=True) for _ in range(2))
                reader.read(layer, seen, {})
                bases = _change_bases(pair, seen)
                reader.read(layer, proof, {}, count=1)
                _prove_bases(seen.states[0], bases, proof.states[0])
                inverse = inverses[table[layer].reach]
                layer_fits.append(_fit_layer(seen, bases, pair, table[layer], inverse, waves[layer]))
                count(None)
    except BaseException:
        for pair, original_values in zip(pairs, before, strict=True):
            for projection, values in zip(pair, original_values, strict=True):
                projection.write(*values)
        raise
    applied_swap(target).fitted = True
    explained, dropped = zip(*layer_fits, strict=True)
    return RotationFit(tuple(map(tuple, explained)), tuple(map(tuple, dropped)))


def check_rotation(model: PreTrainedModel, scheme: RotaryScheme) -> None:
    """Raise the errors of `fit_rotation` for a swap of the unswapped `model`, which may be on meta, to `scheme`."""
    _check_angles(scheme, str(scheme))
    _pairs(model, check_base(unwrap(model), scheme, _OWNER, table_only=True, runs=False))


def _pairs(model: PreTrainedModel, sites: Sites) -> list[tuple[Projection, Projection]]:
    """Return the projections of queries and keys in each layer."""
    geometry = sites.geometry
    if geometry.num_kv_heads != geometry.num_heads:
        raise UnsupportedSwapError(
            f"{_OWNER}: {geometry.num_heads} query heads of {type(model).__name__} share {geometry.num_kv_heads} key "
            "heads, and a change of basis needs separate heads."
        )
    attention = [model.get_submodule(path) for path in sites.main.attention]
    pairs = [find_projections(module, geometry.num_heads, geometry.head_dim) for module in attention]
    inexact_dtype = next(
        (projection.dtype for pair in pairs for projection in pair if projection.dtype not in _EXACT_ENOUGH), None
    )
    if inexact_dtype is not None:
        raise UnsupportedSwapError(
            f"{_OWNER} changes the bases of heads, which {inexact_dtype} cannot hold: load {type(model).__name__} with "
            "dtype=torch.float32."
        )
    return pairs


def _checked_scheme(model: PreTrainedModel) -> RotaryScheme:
    patch = getattr(model, "_posswap", None)
    if patch is None or not patch.can_undo:
        reason = "carries no swap" if patch is None else "was loaded with its swap, so the table's effect is unknown"
        raise NotPatchedError(
            f"{_OWNER}: {type(model).__name__} {reason}. Load the base, patch_model(model, 'rope', partial=0.5), and "
            "fit."
        )
    if patch.fitted:
        raise NotPatchedError(f"{_OWNER}: {type(model).__name__} is fitted already. Load the base, and swap it again.")
    return _check_angles(patch.plan.scheme, patch.plan.named)


def _check_angles(scheme: Scheme, named: str) -> RotaryScheme:
    if not isinstance(scheme, RotaryScheme) or not scheme.is_fixed:
        raise SchemeError(
            f"{_OWNER} fits schemes that rotate by fixed angles, such as rope:partial=0.5, and this is "
            f"{named}. The bias of alibi, kerple and t5: fit_bias."
        )
    if scheme.filled("partial") >= 1:
        raise SchemeError(
            f"{_OWNER}: {scheme.name} rotates whole heads, which leaves no dimensions for content. Swap to "
            f"{scheme.name}:partial=0.5."
        )
    return scheme


@dataclass(frozen=True)
class _Waves:
    """The functions of distance that a rotation can add to scores, cos(theta d) and sin(theta d), and a constant.

    Attributes:
        theta: radians per position, [R/2], float64.
        factor: factor on all scores of the rotating dimensions.
        first, second: the two dimensions of each pair, each [R/2].
        near: visible distances within the texts, [N].
        beyond: farther distances that the swapped model should reach, [M]; empty for a local layer.
    """

    theta: Tensor
    factor: float
    first: Tensor
    second: Tensor
    near: Tensor
    beyond: Tensor

    @classmethod
    def of(cls, scheme: RotaryScheme, geometry: Geometry, watch: BaseWatch, longest: int, reach: int | None) -> _Waves:
        angles = scheme.angles(geometry)
        theta = angles.exact.cpu()
        pairs, index = len(theta), torch.arange(len(theta))
        first, second = (index, index + pairs) if scheme.layout == "half" else (2 * index, 2 * index + 1)
        near = watch.distances[watch.sees(watch.distances)]
        is_local = len(near) < len(watch.distances)
        count = 0 if is_local else min(max((reach or longest) - longest, 0), _MOST_BEYOND)
        beyond = torch.linspace(longest, max((reach or longest) - 1, longest), count).round()
        if not geometry.causal:
            beyond = torch.cat([-beyond.flip(0), beyond])
        return cls(theta, float(angles.attention_factor) ** 2, first, second, near, beyond)

    def fit(self, wanted: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine amplitudes [R/2] of a head whose table adds `wanted` [N], and the share explained.

        Args:
            wanted: by distance, up to a constant.
            attention: paid to each distance, [N].
        """
        count, pairs = len(self.near), len(self.theta)
        weight = distance_weights(attention)
        edge = max(count // 4, 1)  # the table's contribution is nearly constant at its end
        ends = torch.where(self.beyond < 0, wanted[:edge].mean(), wanted[-edge:].mean())
        target, distances = torch.cat([wanted, ends]), torch.cat([self.near, self.beyond])
        weights = torch.cat([weight, torch.full_like(ends, _BEYOND / max(len(ends), 1))])
        turns = self.theta[:, None] * distances
        waves = torch.cat([turns.cos(), turns.sin(), torch.ones(1, len(distances), dtype=torch.float64)])
        penalty = torch.full((2 * pairs + 1,), _RIDGE, dtype=torch.float64)
        penalty[-1] = 0.0
        solved = torch.linalg.solve((waves * weights) @ waves.T + penalty.diag(), (waves * weights) @ target)
        missed = wanted - solved @ waves[:, :count]
        missed = missed - (weight * missed).sum()  # a constant, which softmax ignores
        variance = (weight * (wanted - (weight * wanted).sum()) ** 2).sum()
        explained = 1 - (weight * missed**2).sum() / variance.clamp(min=torch.finfo(torch.float64).tiny)
        return solved[:-1].unflatten(0, (2, pairs)), explained


def _change_bases(pair: tuple[Projection, Projection], seen: StateWatch) -> tuple[Tensor, Tensor]:
    """Write the projections of a layer in balanced coordinates, and return their bases."""
    bases = balanced_bases(*(torch.cat(states, dim=1) for states in zip(*seen.states, strict=True)))
    for projection, basis in zip(pair, bases, strict=True):
        weight, bias = projection.read()
        projection.write(basis @ weight, (basis @ bias[..., None])[..., 0])
    return bases


def _fit_layer(
    seen: StateWatch,
    bases: tuple[Tensor, Tensor],
    pair: tuple[Projection, Projection],
    table: BaseWatch,
    inverse: Tensor,
    waves: _Waves,
) -> tuple[list[float], list[float]]:
    """Write the fitted projections of a layer, and return the shares explained and dropped of each head.

    Args:
        seen: states of the layer before the change of basis.
        bases: the new bases of its projections.
        pair: the projections of queries and keys.
        table: the profile of the layer in the unswapped model.
        inverse: inverse of the normal matrix of all distances.
        waves: the functions that the rotation can represent.
    """
    turning = torch.cat([waves.first, waves.second])
    profile, squares = torch.zeros(len(table.profile), len(waves.near), dtype=torch.float64), []
    for query, key in ([x @ basis.mT for x, basis in zip(state, bases, strict=True)] for state in seen.states):
        squares.append(query.square().mean(dim=1) * key.var(dim=1, correction=0))  # [H, D]
        query[..., turning], key[..., turning] = 0.0, 0.0
        profile += centred_sums(query * seen.scaling, key, waves.near)
    share = torch.stack(squares).mean(dim=0)
    dropped = share[:, turning].sum(dim=1) / share.sum(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    near = table.sees(table.distances)
    target_bias = (table.profile[:, near] - profile) @ inverse  # [H, N]
    fitted = [waves.fit(*head) for head in zip(target_bias, table.attention[:, near], strict=True)]
    waves_of = torch.stack([amplitudes for amplitudes, _ in fitted]) / (seen.scaling * waves.factor)  # [H, 2, R/2]
    size, phase = waves_of.norm(dim=1).sqrt(), torch.atan2(waves_of[:, 1], waves_of[:, 0])  # [H, R/2] each
    for projection, angle in zip(pair, (torch.zeros_like(phase), phase), strict=True):
        weight, bias = projection.read()
        weight[:, turning] = 0.0
        bias[:, waves.first], bias[:, waves.second] = size * angle.cos(), size * angle.sin()
        projection.write(weight, bias)
    return [float(explained) for _, explained in fitted], dropped.tolist()


def _prove_bases(before: tuple[Tensor, Tensor], bases: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> None:
    """Raise UnsupportedSwapError unless queries and keys follow the change of basis of their projections."""
    for old, basis, new in zip(before, bases, after, strict=True):
        expected = old @ basis.mT
        error = float((new - expected).abs().max() / expected.abs().max())
        if not error <= _ALLOWED:
            raise UnsupportedSwapError(
                f"{_OWNER}: queries and keys deviate from the change of basis of their projections by {error:.1e} of "
                "the largest value: the model transforms them before the scores. The model is restored."
            )


@dataclass(frozen=True)
class Projection:
    """The rows of one linear module that compute the queries, or the keys, of one attention module.

    Attributes:
        module: Linear, or transformers' Conv1D, whose weight is transposed.
        first: first row of the first head.
        heads: H.
        head_dim: D.
    """

    module: nn.Module
    first: int
    heads: int
    head_dim: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self._weight_and_bias()[0].dtype

    def read(self) -> tuple[Tensor, Tensor]:
        """Return copies of weight [H, D, E] and bias [H, D], float64 on the CPU."""
        weight, bias = self._weight_and_bias()
        shape = (self.heads, self.head_dim)
        copies = (tensor.to("cpu", torch.float64, copy=True) for tensor in (weight, bias))
        weight, bias = (tensor.unflatten(0, shape) for tensor in copies)
        return weight, bias

    @torch.no_grad()
    def write(self, weight: Tensor, bias: Tensor) -> None:
        """Write `weight` [H, D, E] and `bias` [H, D] in the dtype and on the device of the model."""
        for current, new in zip(self._weight_and_bias(), (weight, bias), strict=True):
            current.copy_(new.flatten(0, 1))

    def _weight_and_bias(self) -> tuple[Tensor, Tensor]:
        weight, bias = self.module.weight, self.module.bias
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        rows = slice(self.first, self.first + self.heads * self.head_dim)
        return (weight.data.T if isinstance(self.module, Conv1D) else weight.data)[rows], bias.data[rows]


def find_projections(attention: nn.Module, heads: int, head_dim: int) -> tuple[Projection, Projection]:
    """Return the projections that compute the queries and the keys of `attention`.

    Raises:
        UnsupportedSwapError: they are not found, are quantized or wrapped by an adapter, or have no bias for constant
            vectors.
    """
    children = {path.rpartition(".")[2]: module for path, module in attention.named_modules()}
    width = heads * head_dim
    for query, key in _PAIRS:
        if query in children and key in children:
            projections = Projection(children[query], 0, heads, head_dim), Projection(children[key], 0, heads, head_dim)
            break
    else:
        fused = next((children[name] for name in _FUSED if name in children), None)
        if fused is None:
            known = ", ".join([*(" and ".join(pair) for pair in _PAIRS), *_FUSED])
            raise UnsupportedSwapError(
                f"{type(attention).__name__} has no query and key projections that are known here ({known})."
            )
        projections = Projection(fused, 0, heads, head_dim), Projection(fused, width, heads, head_dim)
    for projection in projections:
        module = projection.module
        if is_adapted(module):
            raise UnsupportedSwapError(
                f"{type(attention).__name__}: an adapter wraps its queries or keys, whose own weights have to be "
                "fitted. Fit the model before adding an adapter, or merge_and_unload() first."
            )
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and not (is_plain(weight) and weight.is_floating_point()):
            raise UnsupportedSwapError(
                f"{type(attention).__name__}: its {type(module).__name__} is quantized ({type(weight).__name__} of "
                f"{weight.dtype}), and the fit writes weights and biases. Load the model without quantization, swap, "
                "fit and save it, and quantize what was saved."
            )
        if not isinstance(module, nn.Linear | Conv1D) or getattr(module, "bias", None) is None:
            raise UnsupportedSwapError(
                f"{type(attention).__name__}: its {type(module).__name__} has no bias, and the fitted scores by "
                "distance are stored in biases of queries and keys. What works: GPT-2, OPT, BERT and similar models."
            )
    return projections


def balanced_bases(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each head two matrices that preserve every score and sort dimensions by their contribution to it.

    With q' = M q and k' = M^-T k, q'.k' = q.k. M is chosen so that the second moment of q' and the covariance of k' are
    the same diagonal matrix (balanced coordinates: Moore 1981, https://doi.org/10.1109/TAC.1981.1102568) with ascending
    entries: a pair of dimensions with a small entry adds little to any score. For keys it is the covariance, because
    softmax ignores a component that all keys share.

    Args:
        queries: [H, N, D], float64.
        keys: [H, N, D], float64.

    Returns:
        M [H, D, D] for queries, and M^-T [H, D, D] for keys.

    Example:
        >>> q, k = torch.randn(2, 1, 50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> for_queries, for_keys = balanced_bases(q, k)
        >>> torch.allclose(q @ for_queries.mT @ for_keys @ k.mT, q @ k.mT)
        True
    """
    moment = queries.mT @ queries / queries.shape[1]
    centred = keys - keys.mean(dim=1, keepdim=True)
    covariance = centred.mT @ centred / keys.shape[1]
    ridge = _RELATIVE * covariance.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    root = torch.linalg.cholesky(covariance + ridge[:, None, None] * torch.eye(keys.shape[2], dtype=torch.float64))
    squares, turn = torch.linalg.eigh(root.mT @ moment @ root)  # rising
    largest = squares[:, -1:].clamp(min=torch.finfo(torch.float64).tiny)
    size = squares.clamp(min=_RELATIVE**2 * largest) ** 0.25  # [H, D], square roots of the diagonal's entries
    for_queries = (turn / size[:, None]).mT @ root.mT
    for_keys = (turn * size[:, None]).mT @ torch.linalg.inv(root)
    return for_queries, for_keys
