"""LayoutLM: an attention class that has the interface, but does not say that it is an encoder's."""

from __future__ import annotations

from transformers.models.layoutlm.modeling_layoutlm import LayoutLMSelfAttention, eager_attention_forward


class LayoutLMInterface(LayoutLMSelfAttention):
    """LayoutLMSelfAttention, and a mask that is left out means that every token sees every other."""

    is_causal = False
    eager_attention = staticmethod(eager_attention_forward)
