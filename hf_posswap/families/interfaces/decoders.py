"""Attention of decoders: with ALiBi (BLOOM, MPT, Falcon), rotary (Falcon), without positions (GPT-Neo, OpenAI GPT)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.mpt.modeling_mpt import MptAttention
from transformers.models.openai.modeling_openai import Attention

from hf_posswap.families.interfaces.base import ThroughInterface, indices, narrowed


class BloomInterface(ThroughInterface, BloomAttention):
    """BloomAttention, through the AttentionInterface: ALiBi, made by the model, is added inside attention."""

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
        **kwargs: Any,
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


class MptInterface(ThroughInterface, MptAttention):
    """MptAttention, through the AttentionInterface: ALiBi, made by the model, is added inside attention.

    Its masks are True where a key is hidden.
    """

    softmax_scale: Any

    def attention(
        self,
        hidden_states: Tensor,
        *,
        position_bias: Tensor,
        cache: Any,
        attention_mask: Tensor | None,
        **kwargs: Any,
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


class FalconInterface(ThroughInterface, FalconAttention):
    """FalconAttention, through the AttentionInterface; one key head serves all query heads, or each a group of them.

    Rotary positions come from the model. With ALiBi, the mask already contains the bias; eager code of transformers
    adds it a second time, this class does not.
    """

    num_kv_heads: Any

    @property
    def num_key_value_groups(self) -> int:
        """Query heads per key head, as the attention functions expect it."""
        return 1 if self.new_decoder_architecture else self.num_heads // self.num_kv_heads

    def attention(
        self,
        hidden_states: Tensor,
        *,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        cache: Any,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        projections = self._split_heads(self.query_key_value(hidden_states))  # [B, Q, H or G, D] each
        query, key, value = (projection.transpose(1, 2) for projection in projections)
        if alibi is None and self.native_positions and position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        # the original applies no dropout in rotary models
        dropout = self.attention_dropout.p if self.config.alibi else 0.0
        kwargs["position_ids"] = position_ids
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.inv_norm_factor, dropout=dropout, **kwargs
        )
        return self.dense(out), weights


class GPTNeoInterface(ThroughInterface, GPTNeoSelfAttention):
    """GPTNeoSelfAttention, through the AttentionInterface; its finite causal buffer is not read.

    Its scores are unscaled, in float32; some of its layers see a window of the past.
    """

    upcasts = True

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        cache: Any,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)  # [B, H, Q, D]
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.attention_type == "local":
            attention_mask = self._windowed(attention_mask, hidden_states, cache)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_id)
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=1.0, dropout=self.attn_dropout.p, **kwargs
        )
        out = self.out_proj(out)
        return self.resid_dropout(out), weights

    def _windowed(self, mask: Tensor | None, hidden: Tensor, cache: Any) -> Tensor:
        rows, columns = indices(hidden, cache, self.layer_id)
        distance = rows[:, None] - columns[None, :]  # [Q, K]
        return narrowed(mask, (distance >= 0) & (distance < self.config.window_size), hidden.dtype)


class OpenAIGPTInterface(ThroughInterface, Attention):
    """Attention of OpenAI GPT, through the AttentionInterface; its finite causal buffer is not read.

    It has no cache, and a separate padding mask.
    """

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Return the output [B, Q, E], and the weights [B, H, Q, K] if `output_attentions`."""
        projections = self.c_attn(hidden_states).split(self.split_size, dim=2)
        query, key, value = (
            projection.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for projection in projections
        )  # [B, H, Q, D]
        rows, columns = indices(hidden_states, None, 0)
        mask = narrowed(attention_mask, rows[:, None] >= columns[None, :], hidden_states.dtype)
        scaling = query.shape[-1] ** -0.5 if self.scale else 1.0
        out, weights = self.attend(query, key, value, mask, scaling=scaling, dropout=self.attn_dropout.p, **kwargs)
        out = self.resid_dropout(self.c_proj(out))
        return [out, weights] if output_attentions else [out]
