"""RoFormer: interleaved rotary positions, made by the encoder and applied inside attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from hf_posswap.families.interfaces.eager import ThroughInterface


class RoFormerInterface(ThroughInterface, RoFormerSelfAttention):
    """RoFormerSelfAttention as self-attention, through the AttentionInterface."""

    @property
    def is_causal(self) -> bool:
        """Whether a mask that is left out means causal."""
        return bool(self.is_decoder)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        sinusoidal_pos: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        projections = (self.query, self.key, self.value)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        if self.native_positions and sinusoidal_pos is not None:
            rotated = [query, key, value] if self.rotary_value else [query, key]
            query, key, *rest = self.apply_rotary_position_embeddings(sinusoidal_pos, *rotated)
            value = rest[0] if rest else value
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.attention_head_size**-0.5, dropout=self.dropout.p, **kwargs
        )
        return out, weights
