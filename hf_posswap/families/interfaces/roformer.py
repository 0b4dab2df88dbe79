"""RoFormer: interleaved rotary positions, made by the encoder and applied inside attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from hf_posswap.families.interfaces.bert_like import BertLike

if TYPE_CHECKING:
    from transformers import Cache


class RoFormerInterface(BertLike, RoFormerSelfAttention):
    """RoFormerSelfAttention as self-attention, through the AttentionInterface."""

    def attention(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        sinusoidal_pos: Tensor | None,
        cache: Cache | None,
        encoder_hidden_states: None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        kwargs["sinusoidal_pos"] = sinusoidal_pos
        return super().attention(hidden_states, attention_mask=attention_mask, cache=cache, **kwargs)

    def placed(
        self, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, object]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, [B, H, Q, D] each, rotated: the values too, where the config says so."""
        angles = kwargs.pop("sinusoidal_pos")
        if not self.native_positions or angles is None:
            return query, key, value
        rotated = [query, key, value] if self.rotary_value else [query, key]
        query, key, *rest = self.apply_rotary_position_embeddings(angles, *rotated)
        return query, key, rest[0] if rest else value
