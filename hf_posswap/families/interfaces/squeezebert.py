"""SqueezeBERT: BERT whose projections are convolutions of width 1, over channels before tokens."""

from __future__ import annotations

from torch import Tensor
from transformers.models.squeezebert.modeling_squeezebert import SqueezeBertSelfAttention

from hf_posswap.families.interfaces.base import ThroughInterface


class SqueezeBertInterface(ThroughInterface, SqueezeBertSelfAttention):
    """SqueezeBertSelfAttention, through the AttentionInterface."""

    is_causal = False
    returns_scores = True

    @staticmethod
    def tokens_first(hidden: Tensor) -> Tensor:
        """Return the input [B, E, Q] of this module in the usual order, [B, Q, E]."""
        return hidden.transpose(1, 2)

    def attention(
        self, hidden_states: Tensor, *, attention_mask: Tensor | None, output_attentions: bool, **kwargs: object
    ) -> dict[str, Tensor | None]:
        """Return the output [B, E, Q] and, if `output_attentions`, the scores [B, H, Q, K] that eager code has."""
        projections = (self.query, self.key, self.value)
        query, key, value = (self.transpose_for_scores(project(hidden_states)) for project in projections)
        out, scores = self.attend(
            query, key, value, attention_mask, scaling=self.attention_head_size**-0.5, dropout=self.dropout.p, **kwargs
        )
        context: dict[str, Tensor | None] = {"context_layer": out.transpose(1, 2)}
        return context | {"attention_score": scores} if output_attentions else context
