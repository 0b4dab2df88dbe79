"""GPT-J: interleaved rotary positions inside attention, scores in float32; without the interface before 5.24."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention, apply_rotary_pos_emb

from hf_posswap.families.interfaces.eager import ThroughInterface


class GPTJInterface(ThroughInterface, GPTJAttention):
    """GPTJAttention, through the AttentionInterface."""

    upcasts = True
    embed_positions: Any
    attn_dropout: Any

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Any,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)  # [B, Q, H, D]
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.native_positions:
            query, key = self._rotated(query, key, position_ids)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.head_dim**-0.5, dropout=self.attn_dropout.p, **kwargs
        )
        out = self.out_proj(out)
        return self.resid_dropout(out), weights

    def _rotated(self, query: Tensor, key: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        table = self.embed_positions.to(position_ids.device)
        sin, cos = table[position_ids].to(key.dtype).chunk(2, dim=-1)  # [B or 1, Q, R/2] each
        width = self.rotary_dim or self.head_dim
        turned = [apply_rotary_pos_emb(x[..., :width], sin, cos) for x in (query, key)]
        query, key = (torch.cat((t, x[..., width:]), dim=-1) for t, x in zip(turned, (query, key), strict=True))
        return query, key
