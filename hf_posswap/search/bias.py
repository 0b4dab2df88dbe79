"""Fitting the bias of a new mechanism to the effect of a learned table on attention scores, before any training.

`check_fit` says whether a swap can be fitted to the table that it replaces, before anything is changed or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.schemes import PerLayer, Scheme, make_scheme
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.common.bias import LinearBias
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.search.fitness import TokenRows
from hf_posswap.search.profiles import (
    NEGLIGIBLE,
    check_rows,
    check_table,
    distance_weights,
    distances_of,
    inverse_of_distances,
    score_profiles,
    watch_table,
)
from hf_posswap.search.rotation import check_rotation
from hf_posswap.utils.progress import counted, reporter_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_OWNER = "fit_bias"


@alone()
def fit_bias(
    model: PreTrainedModel, scheme: Scheme | str | dict[str, object], tokens: TokenRows, *, progress: bool | None = None
) -> PerLayer:
    """Return `scheme` with the bias per layer and head that best approximates the effect of the position table.

    With the table, a layer's scores are s_ij = scaling q_i k_j; without it, and with the fitted biases in the layers
    before, they are r_ij. The bias b(i - j) of that layer and head is the least-squares fit of their difference,

        a = argmin over a, c of the sum of (s_ij - r_ij - a(i - j) - c_i)^2,
    b = argmin over b, c of the sum over d of w_d (a(d) - b(d) - c)^2,

    The first fit runs over all query-key pairs (i, j) that the layer sees (by causality, and within the window of a
    local layer) in all texts; a is any function, and c_i is free because softmax ignores it. In the second, w_d is the
    attention that the model with its table pays to distance d, plus 5 % of the total weight spread evenly over the
    distances that the layer sees. Layers are fitted one after the other, so each corrects the residual of earlier
    layers. For "alibi" b(d) = -m |d| with m >= 0; for "t5" b is a number per bucket, and buckets without data take the
    value of the next nearer bucket. The result has six significant digits, is stored in the swap's record, and is never
    fitted again.

    The swap removes the whole table, including the mean of its rows: call `centre_table(model)` before the fit to keep
    the mean.

    Args:
        model: an unswapped model of one stack with a learned table; it is not changed. It reads every text once with
            the table, and once per layer without it.
        scheme: "alibi" or "t5", with or without the options interpolation, num_buckets, max_distance.
        tokens: rows of token ids, one text per row, without padding, each within the original length.
        progress: show a bar of the layers; None: in a notebook and on a terminal, unless HF_HUB_DISABLE_PROGRESS_BARS
            or `disable_progress_bar` of transformers turns bars off.

    Returns:
        The scheme of each layer, for `patch_model(model, fit_bias(model, "alibi", tokens))`.

    Raises:
        SchemeError: another scheme, or a field is set that the fit determines.
        UnsupportedSwapError: the model has no learned table, another mechanism in addition to it, several stacks, or
            its attention cannot be patched.
        UnsupportedModelError: no family describes it, or its weights are on meta.
        DataError: tokens are not rows of the model's token ids, too long, padded, or all too short to compare.
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
    sites = check_table(unwrapped, requested, _OWNER)
    rows = check_rows(tokens, unwrapped, sites)
    geometry = sites.geometry
    resolved = requested.resolve(geometry, None)
    assert isinstance(resolved, LinearBias)
    distances = distances_of(geometry, max(map(len, rows)))
    features = resolved.features(distances, geometry)  # [F, N]
    inverses: dict[tuple[int, int] | None, Tensor] = {}  # shared by layers with the same reach
    fitted_layers: dict[int, Scheme] = {}
    with counted(reporter, "fit_bias: layers", geometry.num_layers) as count:
        table_watches = watch_table(unwrapped, geometry, rows)
        for layer in range(geometry.num_layers):
            untabled_profile = score_profiles(unwrapped, Alibi(), geometry, rows, [layer], fitted_layers)[layer]
            table = table_watches[layer]
            seen = table.sees(distances)  # [N]
            if table.reach not in inverses:
                inverses[table.reach] = inverse_of_distances(distances[seen], rows)
            target_bias = (table.profile - untabled_profile)[:, seen] @ inverses[table.reach]  # [H, visible distances]
            attention = table.attention[:, seen]
            weights = [_solved(features[:, seen], *pair) for pair in zip(target_bias, attention, strict=True)]
            fitted_layers[layer] = resolved.with_weights(torch.stack(weights), geometry)
            count(None)
    return PerLayer(layers=fitted_layers)  # type: ignore[arg-type]


def _solved(features: Tensor, wanted: Tensor, attention: Tensor) -> Tensor:
    """Return the minimum-norm least-squares weights [F] of a head for `wanted` [N]; NaN for zero features [F, N]."""
    free = torch.cat([features, torch.ones_like(wanted)[None]])
    weighted = free * distance_weights(attention)
    weights = (torch.linalg.pinv(weighted @ free.T, rtol=NEGLIGIBLE, hermitian=True) @ (weighted @ wanted))[:-1]
    weights[~features.any(dim=1)] = torch.nan
    return weights


def _checked_scheme(scheme: Scheme | str | Mapping[str, object]) -> LinearBias:
    bias_scheme = make_scheme(scheme)
    if not isinstance(bias_scheme, LinearBias):
        raise SchemeError(f"{_OWNER}: scheme must be alibi or t5, whose bias can be fitted, got {bias_scheme}.")
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
        UnsupportedSwapError, UnsupportedModelError: the model has no table to fit to, or unsupported projections.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.schemes import Alibi
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> check_fit(model, Alibi())
    """
    if isinstance(scheme, RotaryScheme):
        check_rotation(model, scheme)
    elif isinstance(scheme, LinearBias):
        check_table(unwrap(model), _checked_scheme(scheme), _OWNER, runs=False)
    else:
        raise SchemeError(
            f"{scheme.name} cannot be fitted to a table. What works: alibi, t5, and rope and its variants with partial "
            "below 1."
        )
