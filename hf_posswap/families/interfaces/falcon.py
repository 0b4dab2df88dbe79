"""Falcon: rotary positions from the model, or ALiBi inside the mask; one key head for all, or groups of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from hf_posswap.families.interfaces.base import ThroughInterface

if TYPE_CHECKING:
    from transformers import Cache


class FalconInterface(ThroughInterface, FalconAttention):
    """FalconAttention, through the AttentionInterface.

    With ALiBi, the mask already contains the bias; eager code of transformers adds it a second time, this class does
    not.
    """

    num_kv_heads: int

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
        cache: Cache | None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: object,
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
