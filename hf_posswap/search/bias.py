"""Fitting the bias of a new mechanism to the attention scores that a learned table gave, before any training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.schemes import PerLayer, Scheme, make_scheme
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.common.bias import LinearBias
from hf_posswap.search.profiles import distances_of, normal_matrix, score_profiles
from hf_posswap.search.tables import BESIDE_TABLE, check_rows, check_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWNER = "fit_bias"
_NEGLIGIBLE = 1e-10
"""Directions of the normal matrix that are smaller than this share of the largest are none: a constant for all keys."""


def fit_bias(model: PreTrainedModel, scheme: Scheme | str | dict[str, Any], tokens: Any) -> PerLayer:
    """Return `scheme` with the bias, for each layer and head, that comes nearest to what the position table does.

    Where the model's table is, a layer's scores are s_ij = scaling q_i k_j; in the same model without it, biases in the
    layers before, they are r_ij. The bias b(i - j) of that layer and head is the least-squares fit of their difference,

        argmin over b, c of the sum of (s_ij - r_ij - b(i - j) - c_i)^2,

    over all pairs of a query i and a key j that causality allows, of all texts, c_i being free, as a softmax does not
    see it. The layers are fitted one after the other, so that each mends what those before it left. For "alibi"
    b(d) = -m |d| with m >= 0; for "t5" a number for each bucket, where buckets that no text shows have the next
    nearer's. What is found has six significant digits, is in the record of the swap, and is never fitted again.

    The swap takes the whole table away, the mean of its rows too: `centre_table(model)` before the fit keeps that.

    Args:
        model: of one stack with a learned table, not swapped; it is left as it was. It reads every text once with the
            table and once for each layer without.
        scheme: "alibi" or "t5", or one of these with options: interpolation, num_buckets, max_distance.
        tokens: rows of token ids to read, one text a row, without padding, each within the original length.

    Returns:
        The scheme for each layer: `patch_model(model, fit_bias(model, "alibi", tokens))` puts it in.

    Raises:
        SchemeError: another scheme, or one that says what the fit finds.
        UnsupportedSwapError: the model has no learned table, another mechanism beside it, several stacks, or nothing
            can be put inside its attention.
        UnsupportedModelError: no family describes it, or its weights are on meta.
        DataError: tokens that are no rows of the model's token ids, too long, padded, or all too short to compare.
        AlreadyPatchedError: it carries a swap.

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
    target: Any = unwrap(model)
    asked = _checked_scheme(scheme)
    sites = check_table(target, asked, _OWNER)
    rows = check_rows(tokens, target, sites)
    geometry = sites.geometry
    resolved = asked.resolve(geometry, None)
    assert isinstance(resolved, LinearBias)
    layers = range(geometry.num_layers)
    distances = distances_of(geometry, max(map(len, rows)))
    features = resolved.features(distances, geometry)  # [F, N]
    matrix = normal_matrix(features, distances, [len(row) for row in rows])
    wanted = score_profiles(target, BESIDE_TABLE, geometry, rows, layers, {})
    found: dict[int, Scheme] = {}
    for layer in layers:
        held = score_profiles(target, Alibi(), geometry, rows, [layer], found)[layer]
        weights = _solved(matrix, features, wanted[layer] - held)
        found[layer] = resolved.with_weights(weights, geometry)
    return PerLayer(layers=found)  # type: ignore[arg-type]


def _solved(matrix: Tensor, features: Tensor, profile: Tensor) -> Tensor:
    """Return the weights [H, F] that solve the normal equations, the smallest of them; NaN for features that are 0."""
    sums = features @ profile.T  # [F, H]
    weights = torch.linalg.pinv(matrix, rtol=_NEGLIGIBLE, hermitian=True) @ sums
    weights[~features.any(dim=1)] = torch.nan
    return weights.T


def _checked_scheme(scheme: Any) -> LinearBias:
    asked = make_scheme(scheme)
    if not isinstance(asked, LinearBias):
        raise SchemeError(f"{_OWNER}: scheme must be alibi or t5, whose bias can be fitted, got {asked}.")
    for name in asked.fitted_fields:
        if getattr(asked, name) != getattr(type(asked), name):
            raise SchemeError(f"{_OWNER}: {name} of {asked.name} is what the fit finds; leave it out.")
    return asked
