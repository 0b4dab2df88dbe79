"""MPNet: a T5-like bias for all layers, made by the encoder and added inside attention."""

from __future__ import annotations

from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from hf_posswap.families.interfaces.base import ThroughInterface


class MPNetInterface(ThroughInterface, MPNetSelfAttention):
    """MPNetSelfAttention, through the AttentionInterface."""

    is_causal = False

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        position_bias: Tensor | None,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor | None, ...]:
        """Return the output [B, Q, E], and the weights [B, H, Q, K] if `output_attentions`."""
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        if self.native_positions:
            kwargs["position_bias"] = position_bias
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.attention_head_size**-0.5, dropout=self.dropout.p, **kwargs
        )
        out = self.o(out)
        return (out, weights) if output_attentions else (out,)
