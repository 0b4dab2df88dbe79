"""GPT-Neo: unscaled scores in float32, and layers that see a window of the past."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from hf_posswap.families.interfaces.base import ThroughInterface, indices, narrowed

if TYPE_CHECKING:
    from transformers import Cache


class GPTNeoInterface(ThroughInterface, GPTNeoSelfAttention):
    """GPTNeoSelfAttention, through the AttentionInterface; its finite causal buffer is not read."""

    upcasts = True

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        cache: Cache,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)  # [B, H, Q, D]
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.attention_type == "local":
            rows, columns = indices(hidden_states, cache, self.layer_id)
            distance = rows[:, None] - columns[None, :]  # [Q, K]
            seen = (distance >= 0) & (distance < self.config.window_size)
            attention_mask = narrowed(attention_mask, seen, hidden_states.dtype)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_id)
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=1.0, dropout=self.attn_dropout.p, **kwargs
        )
        out = self.out_proj(out)
        return self.resid_dropout(out), weights
