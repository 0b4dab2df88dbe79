"""LayoutLM: an attention class with the interface that is not marked as an encoder's."""

from __future__ import annotations

from transformers.models.layoutlm.modeling_layoutlm import LayoutLMSelfAttention, eager_attention_forward


class LayoutLMInterface(LayoutLMSelfAttention):
    """LayoutLMSelfAttention in which no mask means bidirectional attention."""

    is_causal = False
    eager_attention = staticmethod(eager_attention_forward)
