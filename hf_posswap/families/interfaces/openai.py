"""OpenAI GPT: no cache, causality from a finite buffer, a separate padding mask."""

from __future__ import annotations

from torch import Tensor
from transformers.models.openai.modeling_openai import Attention

from hf_posswap.families.interfaces.base import ThroughInterface, indices, narrowed


class OpenAIGPTInterface(ThroughInterface, Attention):
    """Attention of OpenAI GPT, through the AttentionInterface; its finite causal buffer is not read."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> list[Tensor | None]:
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
