"""Selection of the rotary pairs that matter, by the 2-norm criterion of MHA2MLA.

Ji et al. 2025, https://arxiv.org/abs/2502.14837, section 3.1: a pair's share of a score is at most ||q_i|| ||k_i||
(Barbero et al. 2024, https://arxiv.org/abs/2410.06205), so each head keeps the rotation of the pairs for which that is
largest on average, and does not rotate the others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.errors import DataError, SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families.sites import Sites
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.guard import changing
from hf_posswap.patching.plan.plan_swap import plan_swap, unwrap
from hf_posswap.schemes import PRope
from hf_posswap.schemes.common import checks
from hf_posswap.search.documents import token_rows
from hf_posswap.search.watching import pair_norms, watched_norms
from hf_posswap.text.tokens import check_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWNER = "select_pairs"


def rank_pairs(model: PreTrainedModel, tokens: Any = None) -> Tensor:
    """Return the weight of each rotary pair in the scores of each key head, ||q_i|| ||k_i||, for each layer.

    With `tokens` these are the mean norms of the model's queries and keys on them (their product is the mean over all
    query-key pairs); without, the norms of the projections' rows, which are equivalent for isotropic inputs. Query
    heads that share a key head are summed.

    Args:
        model: an unswapped rotary model; it is not changed.
        tokens: rows of token ids, one text per row, each within the original length; None: only weights.

    Returns:
        [layers, G, R/2], float64 on the CPU.

    Raises:
        UnsupportedSwapError: the model is not rotary, cannot be patched inside attention, or (without tokens) has no
            separate projections for queries and keys.
        UnsupportedModelError: no family describes it, or its weights are on meta.
        SchemeError: its rotation depends on the length, so that it cannot be measured.
        DataError: tokens are not rows of the model's token ids, or too long.
        AlreadyPatchedError: it carries a swap.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                      num_key_value_heads=1, vocab_size=32, max_position_embeddings=16)
        >>> model = LlamaForCausalLM(config)
        >>> rank_pairs(model).shape, rank_pairs(model, [[1, 2, 3]]).shape
        (torch.Size([2, 1, 4]), torch.Size([2, 1, 4]))
    """
    target: Any = unwrap(model)
    sites = _checked_sites(target)
    if tokens is None:
        return _weight_norms(target, sites)
    rows = token_rows(tokens)
    for index, row in enumerate(rows):
        check_token_ids(target, row)
        if len(row) > sites.geometry.original_length:
            raise DataError(
                f"tokens[{index}] has {len(row)} tokens, and the model's length is {sites.geometry.original_length}: "
                "its norms beyond that are not meaningful; cut the row."
            )
    with changing(target, "rank_pairs"):
        query, key = watched_norms(target, sites.geometry, rows)
    return _by_key_head(query, key)


def select_pairs(model: PreTrainedModel, share: float, tokens: Any = None, *, by_head: bool = True) -> dict[int, PRope]:
    """Return, for each layer, the p-RoPE that keeps the `share` of rotary pairs with the largest 2-norms.

    `patch_model(model, select_pairs(model, 0.25, tokens))` puts it in.

    Args:
        model: as in `rank_pairs`.
        share: share of the R/2 pairs to keep, in (0, 1]; rounded down.
        tokens: as in `rank_pairs`; None: by the weights alone.
        by_head: whether each key head selects its pairs, as in MHA2MLA; otherwise the heads of a layer share them.

    Raises:
        SchemeError: the share is invalid, or keeps no pair.
        Others: as `rank_pairs`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                      num_key_value_heads=1, vocab_size=32, max_position_embeddings=16)
        >>> model = LlamaForCausalLM(config)
        >>> len(select_pairs(model, 0.5)[0].select[0])
        2
    """
    share = checks.number(_OWNER, "share", share, above=0.0, maximum=1.0)
    checks.flag(_OWNER, "by_head", by_head)
    norms = rank_pairs(model, tokens)  # [layers, G, R/2]
    kept = math.floor(share * norms.shape[-1] + 1e-9)
    if not kept:
        raise SchemeError(
            f"{_OWNER}: share={share:g} of this model's {norms.shape[-1]} rotary pairs is none; give a larger one."
        )
    if not by_head:
        norms = norms.sum(dim=1, keepdim=True)
    best = norms.sort(dim=-1, descending=True, stable=True).indices[..., :kept]  # [layers, G or 1, kept]
    chosen: list[Any] = (best if by_head else best[:, 0]).tolist()
    return {layer: PRope(select=select) for layer, select in enumerate(chosen)}


def _checked_sites(model: Any) -> Sites:
    plan = plan_swap(model, PRope(select=(0,)), site="attention")
    if not plan.sites.rotary:
        raise UnsupportedSwapError(f"{type(model).__name__} has a position table and no rotary pairs to rank.")
    unrotated = plan.sites.main.nope_layers
    if unrotated:
        raise UnsupportedSwapError(
            f"layers {', '.join(map(str, unrotated))} of {type(model).__name__} do not rotate, so they have no rotary "
            "pairs to rank. What works: models in which all layers rotate."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError("ranking pairs needs the model's weights, and these are on meta: load them.")
    return plan.sites


def _weight_norms(model: Any, sites: Sites) -> Tensor:
    """Return the product of the norms of each pair's query and key rows, [layers, G, R/2]."""
    norms = []
    for path in sites.attention:
        module = model.get_submodule(path)
        query, key = (_rows(module, name, path) for name in ("q_proj", "k_proj"))
        heads, groups = sites.geometry.num_heads, sites.geometry.num_kv_heads
        norms.append((_row_norms(query, heads, sites.geometry), _row_norms(key, groups, sites.geometry)))
    queries, keys = zip(*norms, strict=True)
    return _by_key_head(torch.stack(queries), torch.stack(keys))


def _rows(module: nn.Module, name: str, path: str) -> Tensor:
    projection = getattr(module, name, None)
    if type(projection) is not nn.Linear:
        raise UnsupportedSwapError(
            f"{path} has no plain {name}, so its pairs cannot be ranked by weights: give tokens to rank them by."
        )
    return projection.weight.detach().cpu().double()  # [H D, E]


def _row_norms(weight: Tensor, heads: int, geometry: Geometry) -> Tensor:
    """Return the norm of the two rows of each pair in a projection [H D, E], [H, R/2]."""
    by_head = weight.unflatten(0, (heads, -1)).transpose(1, 2)  # [H, E, D]
    return pair_norms(by_head, geometry).square().sum(dim=1).sqrt()


def _by_key_head(query: Tensor, key: Tensor) -> Tensor:
    """Return ||q_i|| ||k_i||, [layers, G, R/2], of norms [layers, H, R/2] and [layers, G, R/2]."""
    return query.unflatten(1, (key.shape[1], -1)).sum(dim=2) * key
