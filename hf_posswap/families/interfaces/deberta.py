"""DeBERTa of both versions: content attends to content, and both to relative positions, which may be switched off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.deberta import modeling_deberta as first
from transformers.models.deberta_v2 import modeling_deberta_v2 as second

from hf_posswap.families.interfaces.base import ThroughInterface


class _Disentangled(ThroughInterface):
    """Base of both versions: masks are per token pair, and the relative bias is added to the scores."""

    is_causal = False

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, relative: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E], and the weights [B, H, Q, K] if `output_attentions`.

        Args:
            query: [B, H, Q, D].
            key: [B, H, K, D].
            value: [B, H, K, D].
            mask: nonzero where a token attends, [B, 1, Q, K].
            relative: what is added to the scaled scores, [B, H, Q, K], or None.
            kwargs: for the attention function.
        """
        returns_weights = kwargs.pop("output_attentions")
        dropout = self.dropout  # type: ignore[attr-defined]
        bias = query.new_zeros(()) if relative is None else relative
        additive = torch.where(mask.bool(), bias, torch.finfo(query.dtype).min)
        out, weights = self.attend(query, key, value, additive, dropout=dropout.p, **kwargs)
        return out, weights if returns_weights else None


class DebertaInterface(_Disentangled, first.DisentangledSelfAttention):
    """DisentangledSelfAttention of DeBERTa, through the AttentionInterface."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor,
        relative_pos: Tensor | None,
        rel_embeddings: Tensor | None,
        output_attentions: bool = False,
        query_states: None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E], and the weights [B, H, Q, K] if `output_attentions`."""
        query, key, value = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)
        query = query + self.transpose_for_scores(self.q_bias[None, None, :])
        value = value + self.transpose_for_scores(self.v_bias[None, None, :])
        factor = 1 + len(self.pos_att_type)
        scaling = float(query.shape[-1] * factor) ** -0.5
        relative = None
        if self.relative_attention and rel_embeddings is not None and relative_pos is not None:
            rows = self.pos_dropout(rel_embeddings)
            relative = self.disentangled_att_bias(query * scaling, key, relative_pos, rows, factor)
        kwargs |= {"scaling": scaling, "output_attentions": output_attentions}
        return self._attended(query, key, value, attention_mask, relative, **kwargs)


class DebertaV2Interface(_Disentangled, second.DisentangledSelfAttention):
    """DisentangledSelfAttention of DeBERTa-v2 and v3, through the AttentionInterface."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor,
        relative_pos: Tensor | None,
        rel_embeddings: Tensor | None,
        output_attentions: bool = False,
        query_states: None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E], and the weights [B, H, Q, K] if `output_attentions`."""
        heads = self.num_attention_heads
        projections = (self.query_proj, self.key_proj, self.value_proj)
        query, key, value = (self.transpose_for_scores(project(hidden_states), heads) for project in projections)
        factor = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        relative = None
        if self.relative_attention and factor > 1:
            rows = self.pos_dropout(rel_embeddings)
            relative = self.disentangled_attention_bias(query, key, relative_pos, rows, factor)
            relative = relative.unflatten(0, (-1, heads))
        query, key, value = (states.unflatten(0, (-1, heads)) for states in (query, key, value))  # [B, H, Q, D]
        kwargs |= {"scaling": float(query.shape[-1] * factor) ** -0.5, "output_attentions": output_attentions}
        return self._attended(query, key, value, attention_mask, relative, **kwargs)
