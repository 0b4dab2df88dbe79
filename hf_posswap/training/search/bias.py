"""Fitting the bias of a new mechanism to the effect of a model's positions on attention scores, before any training.

`check_fit` says whether a swap can be fitted to the positions that it replaces, before anything is changed or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posswap.errors import NumericError, SchemeError
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.apply.patch_model import patched
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.schemes import NoPE, PerLayer, Scheme, make_scheme
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.common.bias import FittedBias
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.search.fitness import TokenRows
from hf_posswap.training.search.profiles import (
    LayerReader,
    ProfileWatch,
    check_base,
    check_rows,
    distance_weights,
    distances_of,
    inverse_of_distances,
    watch_base,
)
from hf_posswap.training.search.rotation import check_rotation
from hf_posswap.utils.progress import counted, reporter_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_OWNER = "fit_bias"


@alone()
def fit_bias(
    model: PreTrainedModel, scheme: Scheme | str | dict[str, object], tokens: TokenRows, *, progress: bool | None = None
) -> PerLayer:
    """Return `scheme` with the bias per layer and head that best approximates the effect of the model's own positions.

    They are a learned table, or a rotation of queries and keys (RoPE, whole or partial). With them, a layer's scores
    are s_ij = scaling q_i k_j; without them, and with the fitted biases in the layers before, they are r_ij. The bias
    b(i - j) of that layer and head is the least-squares fit of their difference,

        a = argmin over a, c of the sum of (s_ij - r_ij - a(i - j) - c_i)^2,
    b = argmin over b, c of the sum over d of w_d (a(d) - b(d) - c)^2,

    The first fit runs over all query-key pairs (i, j) that the layer sees (by causality, and within the window of a
    local layer) in all texts; a is any function, and c_i is free because softmax ignores it. In the second, w_d is the
    attention that the unswapped model pays to distance d, plus 5 % of the total weight spread evenly over the distances
    that the layer sees. Layers are fitted one after the other, so each corrects the residual of earlier layers. For
    "alibi" b(d) = -m |d| with m >= 0; for "kerple" b is the nearest of a grid of r2, each with the r1 nearest to it;
    for "t5" b is a number per bucket, and buckets without data take the value of the next nearer bucket. The result has
    six significant digits, is stored in the swap's record, and is never fitted again.

    The effect of a rotation depends on the queries and keys, not only on the distance; a is its mean at each distance.
    Layers without rotation in a model whose other layers rotate stay without positions.

    The swap removes a whole table, including the mean of its rows: call `centre_table(model)` before the fit to keep
    the mean.

    Args:
        model: an unswapped model of one stack; it is not changed. It reads every text once as it is, and once without
            its positions: all texts up to the first layer, which is fitted, then on to the next. A model whose layers
            also take keys or states of earlier ones reads every text again up to each layer.
        scheme: "alibi", "kerple" or "t5", with or without the options interpolation, learned, variant,
            num_buckets, max_distance.
        tokens: rows of token ids, one text per row, without padding, each within the original length. A few rows of
            1,024 tokens are enough; the time grows with the square and the cube of the longest.
        progress: show a bar of the layers; None: in a notebook and on a terminal, unless HF_HUB_DISABLE_PROGRESS_BARS
            or `disable_progress_bar` of transformers turns bars off.

    Returns:
        The scheme of each layer, for `patch_model(model, fit_bias(model, "alibi", tokens))`.

    Raises:
        SchemeError: another scheme, or a field is set that the fit determines.
        UnsupportedSwapError: the model has neither a learned table nor a rotation, or both, several stacks, scores
            that are changed before the softmax (soft-capping, sinks), or attention that cannot be patched.
        UnsupportedModelError: no family describes it, or its weights are on meta.
        DataError: tokens are not rows of the model's token ids, too long, padded, or all too short to compare.
        NumericError: attention scores of the model are not finite.
        AlreadyPatchedError: it carries a swap.
        ModelInUseError: a forward of the model is running, or another thread changes it.
        OptionError: `progress` is not True, False or None.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model, swap_plan
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> fitted = fit_bias(model, "alibi", torch.arange(32).view(2, 16) % 11)
        >>> [len(fitted.of_layer(layer).slopes) for layer in range(2)]
        [2, 2]
        >>> swap_plan(patch_model(model, fitted)).scheme == fitted
        True
    """
    reporter = reporter_for(progress)
    unwrapped = unwrap(model)
    requested = _checked_scheme(scheme)
    sites = check_base(unwrapped, requested, _OWNER)
    rows = check_rows(tokens, unwrapped, sites)
    geometry = sites.geometry
    resolved = requested.resolve(geometry, None)
    assert isinstance(resolved, FittedBias)
    longest = max(map(len, rows))
    distances = distances_of(geometry, longest)
    inverses: dict[tuple[int, int] | None, Tensor] = {}  # shared by layers with the same reach
    fitted_layers: dict[int, Scheme] = {}
    base = watch_base(unwrapped, geometry, rows)
    with counted(reporter, "fit_bias: layers", len(base)) as count, patched(unwrapped, Alibi()):
        acting: dict[int, Mechanism] = {}  # the fitted biases
        reader = LayerReader(unwrapped, Mechanism(), geometry, rows)
        for layer, record in base.items():
            watch = ProfileWatch(geometry, longest, ends_forward=True)
            reader.read(layer, watch, acting)
            seen = record.sees(distances)  # [N]
            if record.reach not in inverses:
                inverses[record.reach] = inverse_of_distances(distances[seen], rows)
            target_bias = (record.profile - watch.profile)[:, seen] @ inverses[record.reach]  # [H, visible distances]
            if not bool(target_bias.isfinite().all()):
                raise NumericError(
                    f"{_OWNER}: attention scores of layer {layer} are not finite, so no bias is nearest to them. Check "
                    "the model's weights, or load it with dtype=torch.float32."
                )
            weights = torch.stack([distance_weights(attention) for attention in record.attention[:, seen]])
            fitted = resolved.fitted(target_bias, weights, distances[seen], geometry)
            fitted_layers[layer], acting[layer] = fitted, fitted.mechanism(geometry)
            count(None)
    others = None if len(base) == geometry.num_layers else NoPE()  # layers that the swap does not reach
    return PerLayer(layers=fitted_layers, default=others)  # type: ignore[arg-type]


def _checked_scheme(scheme: Scheme | str | Mapping[str, object]) -> FittedBias:
    bias_scheme = make_scheme(scheme)
    if not isinstance(bias_scheme, FittedBias):
        raise SchemeError(f"{_OWNER}: scheme must be alibi, kerple or t5, whose bias can be fitted, got {bias_scheme}.")
    for name in bias_scheme.fitted_fields:
        if getattr(bias_scheme, name) != getattr(type(bias_scheme), name):
            raise SchemeError(f"{_OWNER}: {name} of {bias_scheme.name} is determined by the fit; leave it out.")
    return bias_scheme


def check_fit(model: PreTrainedModel, scheme: Scheme) -> None:
    """Check that `fit_bias` or `fit_rotation` can fit a swap of `model` to `scheme`.

    Args:
        model: the unswapped model, which may be on meta; it is not changed.
        scheme: the scheme; resolved, as in the plan of the swap, if it rotates.

    Raises:
        SchemeError: the scheme cannot be fitted, sets a field that the fit determines, or rotates whole heads.
        UnsupportedSwapError, UnsupportedModelError: the model has no positions to fit to, or unsupported projections.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.schemes import Alibi
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> check_fit(model, Alibi())
    """
    if isinstance(scheme, RotaryScheme):
        check_rotation(model, scheme)
    elif isinstance(scheme, FittedBias):
        check_base(unwrap(model), _checked_scheme(scheme), _OWNER, runs=False)
    else:
        raise SchemeError(
            f"{scheme.name} cannot be fitted to the model's positions. What works: alibi, kerple and t5, and, to a "
            "learned table, rope and its variants with partial below 1."
        )
