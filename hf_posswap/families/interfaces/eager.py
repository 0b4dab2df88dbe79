"""What the attention classes share: the eager arithmetic of their originals, and how masks are joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.transformers_attention import attention_function, attention_implementation
from hf_posswap.compat.transformers_cache import keys_of_call, tokens_before


class ThroughInterface:
    """Mixed into a native attention class, before it: attends as the config says, through the AttentionInterface.

    Attributes:
        config: of the model; a module whose own class keeps none is given it.
        upcasts: whether eager scores are computed in float32.
        returns_scores: whether eager code hands out the scores in the place of the weights.
        native_positions: whether positions that the original applies inside attention are applied here too.
    """

    config: Any
    training: bool
    upcasts = False
    returns_scores = False
    native_positions = True

    @staticmethod
    def eager_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Attend as `eager_attention_forward` does: what the implementation "eager" means for this module."""
        return eager_attention_forward(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        dropout: float,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none.

        Args:
            query: [B, H, Q, D].
            key: [B, G, K, D].
            value: [B, G, K, D].
            mask: additive, or bool (True: attend), [B, 1, Q, K]; None as transformers leaves it out.
            scaling: multiplies the scores.
            dropout: probability of dropping a weight, while training.
            kwargs: for the attention function.
        """
        chosen = attention_function(attention_implementation(self.config), self.eager_attention)
        dropout = dropout if self.training else 0.0
        out, weights = chosen(self, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return out.flatten(2), weights


def eager_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, Q, H, D] and the weights [B, H, Q, K] of attention, the softmax in float32.

    Args:
        module: the attention module, a `ThroughInterface`.
        query: [B, H, Q, D].
        key: [B, G, K, D]; each of its heads serves H / G heads of the query.
        value: [B, G, K, D].
        attention_mask: added to the scores, or bool (True: attend), [B, 1 or H, Q or 1, K]; None: all is seen.
        scaling: multiplies the scores.
        dropout: probability of dropping a weight, while training.
        position_bias: added to the scaled scores, [B or 1, H, Q or 1, K].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if module.upcasts:
        query, key = query.float(), key.float()
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling  # [B, H, Q, K]
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), scores if module.returns_scores else weights


def narrowed(mask: Tensor | None, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `mask` with everything masked that is not in `seen`, as what is added to scores of `dtype`.

    Args:
        mask: additive, or bool (True: attend), [B, 1, Q or 1, K]; None: nothing is masked yet.
        seen: bool, [Q, K] or [B, 1, Q, K].
        dtype: of the scores.
    """
    lowest = torch.finfo(dtype).min
    if mask is None:
        mask = torch.zeros((1, 1, 1, 1), dtype=dtype, device=seen.device)
    elif mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)
    return torch.where(seen, mask, lowest)


def indices(hidden: Tensor, cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Return the indices in the sequence of queries [Q] and keys [K], before `cache` takes the new keys.

    Args:
        hidden: input of the attention module, [B, Q, E].
        cache: a transformers cache, or None.
        layer: of the cache.
    """
    length = hidden.shape[1]
    query = torch.arange(length, device=hidden.device)
    if cache is None:
        return query, query
    keys, offset = keys_of_call(cache, length, layer)
    return query + tokens_before(cache, layer), torch.arange(keys, device=hidden.device) + offset
