"""XGLM: the self-attention of a decoder, as BART has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.xglm.modeling_xglm import XGLMAttention

from hf_posswap.families.interfaces.eager import ThroughInterface


class XGLMInterface(ThroughInterface, XGLMAttention):
    """XGLMAttention as self-attention, through the AttentionInterface."""

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.scaling, dropout=self.dropout or 0.0, **kwargs
        )
        return self.out_proj(out), weights
