"""GPT-J and CodeGen: interleaved rotary positions inside attention; without the interface before transformers 5.24."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.codegen.modeling_codegen import CodeGenAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention, apply_rotary_pos_emb

from hf_posswap.families.interfaces.base import ThroughInterface

if TYPE_CHECKING:
    from transformers import Cache

    pass

_PARTS = 4
"""Of CodeGen's single projection for q, v and k."""


class _RotaryInside(ThroughInterface):
    """Base of both: their scores are in float32."""

    upcasts = True
    embed_positions: Tensor
    attn_dropout: nn.Dropout
    rotary_dim: Any
    head_dim: int

    def _rotated(self, query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k, [B, Q, H, D] each, the first R dimensions of a head rotated."""
        sin, cos = angles.chunk(2, dim=-1)  # [B or 1, Q, R/2] each
        width = self.rotary_dim or self.head_dim
        turned = [apply_rotary_pos_emb(x[..., :width], sin, cos) for x in (query, key)]
        query, key = (torch.cat((t, x[..., width:]), dim=-1) for t, x in zip(turned, (query, key), strict=True))
        return query, key


class GPTJInterface(_RotaryInside, GPTJAttention):
    """GPTJAttention, through the AttentionInterface."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Cache | None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: object,
    ) -> Any:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)  # [B, Q, H, D]
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.native_positions:
            query, key = self._rotated(
                query, key, self.embed_positions.to(position_ids.device)[position_ids].to(key.dtype)
            )
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.head_dim**-0.5, dropout=self.attn_dropout.p, **kwargs
        )
        out = self.out_proj(out)
        return self.resid_dropout(out), weights


class CodeGenInterface(_RotaryInside, CodeGenAttention):
    """CodeGenAttention, through the AttentionInterface: as GPT-J's, but for its projection and wider angles."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Cache | None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: object,
    ) -> Any:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        stacked = self.qkv_proj(hidden_states).unflatten(-1, (_PARTS, 3, -1))
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, self.head_dim)
        query, value, key = (projection.reshape(shape) for projection in stacked.unbind(dim=-2))  # [B, Q, H, D]
        if self.native_positions:
            query, key = self._rotated(query, key, self.embed_positions.to(position_ids.device)[position_ids])
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key.to(hidden_states.dtype), value, self.layer_idx)
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.head_dim**-0.5, dropout=self.attn_dropout.p, **kwargs
        )
        out = self.out_proj(out)
        return self.resid_dropout(out), weights
