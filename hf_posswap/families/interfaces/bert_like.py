"""BERT's former self-attention, in classes that kept it when BERT moved to the interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.models.big_bird.modeling_big_bird import BigBirdSelfAttention
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import BigBirdPegasusSelfAttention
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertSelfAttention
from transformers.models.rembert.modeling_rembert import RemBertSelfAttention

from hf_posswap.compat.transformers_calls import self_attention_cache
from hf_posswap.families.interfaces.base import CausalIfDecoder

if TYPE_CHECKING:
    from transformers import Cache


class BertLike(CausalIfDecoder):
    """Mixed into a native class with `query`, `key` and `value`, before it."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        cache: Cache | None,
        encoder_hidden_states: None = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        module: Any = self
        shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
        projections = (module.query, module.key, module.value)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        query, key, value = self.placed(query, key, value, kwargs)
        cache = self_attention_cache(cache)
        if cache is not None:
            key, value = cache.update(key, value, module.layer_idx)
        return self.attend(
            query,
            key,
            value,
            attention_mask,
            scaling=module.attention_head_size**-0.5,
            dropout=module.dropout.p,
            **kwargs,
        )

    def placed(
        self, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, object]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, [B, H, Q, D] each, with the positions that are native inside attention: here, none."""
        return query, key, value


class BigBirdInterface(BertLike, BigBirdSelfAttention):
    """BigBirdSelfAttention, which sees all keys, as self-attention through the AttentionInterface."""


class BigBirdPegasusInterface(BertLike, BigBirdPegasusSelfAttention):
    """BigBirdPegasusSelfAttention, which sees all keys, through the AttentionInterface."""


class MegatronBertInterface(BertLike, MegatronBertSelfAttention):
    """MegatronBertSelfAttention as self-attention, through the AttentionInterface."""


class RemBertInterface(BertLike, RemBertSelfAttention):
    """RemBertSelfAttention as self-attention, through the AttentionInterface."""
