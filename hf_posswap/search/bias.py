"""Fitting the bias of a new mechanism to the attention scores that a learned table gave, before any training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.schemes import PerLayer, Scheme, make_scheme
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.common.bias import LinearBias
from hf_posswap.search.profiles import distances_of, score_profiles
from hf_posswap.search.table_effect import NEGLIGIBLE, distance_weights, inverse_of_distances, watch_table
from hf_posswap.search.tables import check_rows, check_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWNER = "fit_bias"


@alone()
def fit_bias(model: PreTrainedModel, scheme: Scheme | str | dict[str, Any], tokens: Any) -> PerLayer:
    """Return `scheme` with the bias, for each layer and head, that comes nearest to what the position table does.

    Where the model's table is, a layer's scores are s_ij = scaling q_i k_j; in the same model without it, biases in the
    layers before, they are r_ij. The bias b(i - j) of that layer and head is the least-squares fit of their difference,

        a = argmin over a, c of the sum of (s_ij - r_ij - a(i - j) - c_i)^2,
    b = argmin over b, c of the sum over d of w_d (a(d) - b(d) - c)^2,

    the first over all pairs of a query i and a key j that the layer sees (by causality, and within its window where it
    is local), of all texts, a being any function, and c_i free, as a softmax does not see it; in the second w_d is the
    attention that the table's model pays to distance d, and a twentieth of all weight is spread evenly over the
    distances that the layer sees. The layers are fitted one after the other, so that each mends what those before it
    left. For "alibi" b(d) = -m |d| with m >= 0; for "t5" a number for each bucket, where buckets that no text shows
    have the next nearer's. What is found has six significant digits, is in the record of the swap, and is never fitted
    again.

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
        ModelInUseError: a forward of the model is running, or another thread changes it.

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
    distances = distances_of(geometry, max(map(len, rows)))
    features = resolved.features(distances, geometry)  # [F, N]
    table = watch_table(target, geometry, rows)
    inverses: dict[tuple[int, int] | None, Tensor] = {}  # of layers that see alike
    found: dict[int, Scheme] = {}
    for layer in range(geometry.num_layers):
        held = score_profiles(target, Alibi(), geometry, rows, [layer], found)[layer]
        seen = table[layer].sees(distances)  # [N]
        if table[layer].reach not in inverses:
            inverses[table[layer].reach] = inverse_of_distances(distances[seen], rows)
        wanted = (table[layer].profile - held)[:, seen] @ inverses[table[layer].reach]  # [H, distances that are seen]
        attention = table[layer].attention[:, seen]
        weights = [_solved(features[:, seen], *pair) for pair in zip(wanted, attention, strict=True)]
        found[layer] = resolved.with_weights(torch.stack(weights), geometry)
    return PerLayer(layers=found)  # type: ignore[arg-type]


def check_bias(model: PreTrainedModel, scheme: Scheme) -> None:
    """Refuse what `fit_bias` could not fit in the unswapped `model`; its errors, but for those about tokens."""
    check_table(unwrap(model), _checked_scheme(scheme), _OWNER)


def _solved(features: Tensor, wanted: Tensor, attention: Tensor) -> Tensor:
    """Return the weights [F] of a head, the smallest that fit `wanted` [N] best; NaN for features [F, N] that are 0."""
    free = torch.cat([features, torch.ones_like(wanted)[None]])
    weighted = free * distance_weights(attention)
    weights = (torch.linalg.pinv(weighted @ free.T, rtol=NEGLIGIBLE, hermitian=True) @ (weighted @ wanted))[:-1]
    weights[~features.any(dim=1)] = torch.nan
    return weights


def _checked_scheme(scheme: Any) -> LinearBias:
    asked = make_scheme(scheme)
    if not isinstance(asked, LinearBias):
        raise SchemeError(f"{_OWNER}: scheme must be alibi or t5, whose bias can be fitted, got {asked}.")
    for name in asked.fitted_fields:
        if getattr(asked, name) != getattr(type(asked), name):
            raise SchemeError(f"{_OWNER}: {name} of {asked.name} is what the fit finds; leave it out.")
    return asked
