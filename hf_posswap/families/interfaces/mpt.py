"""MPT: ALiBi, made by the model and added inside attention; masks are True where a key is hidden."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.mpt.modeling_mpt import MptAttention

from hf_posswap.families.interfaces.base import ThroughInterface


class MptInterface(ThroughInterface, MptAttention):
    """MptAttention, through the AttentionInterface."""

    softmax_scale: float

    def attention(
        self,
        hidden_states: Tensor,
        *,
        position_bias: Tensor,
        cache: Any,
        attention_mask: Tensor | None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        stacked = self.Wqkv(hidden_states)
        if self.clip_qkv:
            stacked = stacked.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        shape = (*hidden_states.shape[:-1], self.n_heads, self.head_dim)
        query, key, value = (
            projection.reshape(shape).transpose(1, 2) for projection in stacked.chunk(3, dim=2)
        )  # [B, H, Q, D]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.native_positions:
            kwargs["position_bias"] = position_bias[None, :, :, -key.shape[2] :]  # [1, H, 1, K]: the last keys
        if attention_mask is not None:
            attention_mask = ~attention_mask
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.softmax_scale, dropout=self.attn_dropout_p, **kwargs
        )
        return self.out_proj(out), weights
