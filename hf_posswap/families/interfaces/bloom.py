"""BLOOM: ALiBi, made by the model and added inside attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

from hf_posswap.families.interfaces.base import ThroughInterface


class BloomInterface(ThroughInterface, BloomAttention):
    """BloomAttention, through the AttentionInterface."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        cache: Any,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output with the residual [B, Q, E], and the weights [B, H, Q, K] where they are kept."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))  # [B, H, Q, D] each
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.native_positions:
            kwargs["position_bias"] = alibi.view(query.shape[0], self.num_heads, 1, -1)
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.inv_norm_factor, dropout=self.attention_dropout.p, **kwargs
        )
        out = self.dense(out)
        return dropout_add(out, residual, self.hidden_dropout, self.training), weights
