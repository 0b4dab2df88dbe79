"""Selection of the rotary pairs that matter, by the 2-norm criterion of MHA2MLA.

Ji et al. 2025, https://arxiv.org/abs/2502.14837, section 3.1: a pair's share of a score is at most ||q_i|| ||k_i||
(Barbero et al. 2024, https://arxiv.org/abs/2410.06205), so each head keeps the rotation of the pairs for which that is
largest on average, and does not rotate the others.

The norms are those of the model's queries and keys while it reads texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_tensors import is_plain
from hf_posswap.errors import DataError, SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families.sites import Sites
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.guard import changing
from hf_posswap.patching.apply.patch_model import patched
from hf_posswap.patching.plan.plan_swap import plan_swap, unwrap
from hf_posswap.rope_math import CosSin
from hf_posswap.schemes import PRope
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.rope import Rope, RotaryMechanism, RotaryScheme, own_theta
from hf_posswap.text.tokens import check_token_ids
from hf_posswap.training.search.fitness import TokenRows, token_rows
from hf_posswap.utils.devices import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWNER = "select_pairs"


def pair_norms(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the 2-norm of each rotary pair of `x` [..., D], float64 [..., R/2]."""
    assert geometry.rotary_dim is not None
    rotated = x[..., : geometry.rotary_dim].double()
    shape = (2, -1) if geometry.layout == "half" else (-1, 2)
    return rotated.unflatten(-1, shape).norm(dim=-2 if geometry.layout == "half" else -1)


def watched_norms(model: PreTrainedModel, geometry: Geometry, rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return the mean norms of each pair of queries [layers, H, R/2] and keys [layers, G, R/2], float64, CPU.

    Args:
        model: the unswapped model, which reads each of `rows` from its start with its own rotation; it is not changed.
        geometry: the model's geometry.
        rows: token ids, one text each.

    Raises:
        SchemeError: its rotation depends on the length.
    """
    if geometry.frequencies is None:
        raise SchemeError(
            f"the rotation of {type(model).__name__} depends on the length of its input, so its queries and keys "
            "cannot be measured; leave tokens out to rank by the weights."
        )
    scheme = Rope(frequencies=geometry.frequencies)
    with evaluating(model), torch.no_grad(), patched(model, scheme, site="attention"):
        watch = _Watch(_OriginalRotation().resolve(geometry, None), geometry)
        path = next(path for path, module in model.named_modules() if isinstance(module, RotaryMechanism))
        model.set_submodule(path, watch)
        for row in rows:
            ids = torch.from_numpy(row.astype(np.int64))[None].to(model.device)
            model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        tokens = sum(map(len, rows))
        layers = [watch.for_layer(index) for index in range(geometry.num_layers)]
        queries = torch.stack([layer.queries for layer in layers]).cpu()
        keys = torch.stack([layer.keys for layer in layers]).cpu()
    return queries / tokens, keys / tokens


@dataclass(frozen=True)
class _OriginalRotation(RotaryScheme):
    """The model's own rotation, including its factor on cos and sin."""

    name: ClassVar[str] = "the model's own rotation"

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        return own_theta(geometry, dtype)

    def attention_scaling(self, geometry: Geometry) -> float:
        return geometry.attention_factor


class _Watch(RotaryMechanism):
    """One `_Layer` for each attention layer."""

    def __init__(self, scheme: _OriginalRotation, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        self.layers = nn.ModuleList([_Layer(scheme, geometry) for _ in range(geometry.num_layers)])

    def for_layer(self, layer: int) -> _Layer:
        recorder = self.layers[layer]
        assert isinstance(recorder, _Layer)
        return recorder


class _Layer(RotaryMechanism):
    """Rotates queries and keys, and sums their norms over all tokens."""

    def __init__(self, scheme: RotaryScheme, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        self.queries = self.keys = torch.zeros(())

    def rotate_query(self, query: Tensor, prepared: CosSin) -> Tensor:
        self.queries = self.queries + pair_norms(query, self.geometry).sum(dim=(0, 2))  # [H, R/2]
        return super().rotate_query(query, prepared)

    def rotate_key(self, key: Tensor, prepared: CosSin) -> Tensor:
        self.keys = self.keys + pair_norms(key, self.geometry).sum(dim=(0, 2))  # [G, R/2]
        return super().rotate_key(key, prepared)


def rank_pairs(model: PreTrainedModel, tokens: TokenRows | None = None) -> Tensor:
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
    target = unwrap(model)
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


def select_pairs(
    model: PreTrainedModel, share: float, tokens: TokenRows | None = None, *, by_head: bool = True
) -> dict[int, PRope]:
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
    chosen = (best if by_head else best[:, 0]).tolist()
    return {layer: PRope(select=select) for layer, select in enumerate(chosen)}


def _checked_sites(model: PreTrainedModel) -> Sites:
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


def _weight_norms(model: PreTrainedModel, sites: Sites) -> Tensor:
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
    if type(projection) is not nn.Linear or not is_plain(projection.weight):
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
