"""T5, mT5 and UMT5 in releases of transformers where they do not use the interface yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.models.longt5.modeling_longt5 import LongT5Attention
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from hf_posswap.compat.transformers_calls import self_attention_cache
from hf_posswap.families.interfaces.base import ThroughInterface

if TYPE_CHECKING:
    from transformers import Cache


class _T5Kind(ThroughInterface):
    """Base of the three: self-attention with unscaled scores and its own bias."""

    is_decoder: bool

    def _attended(
        self, hidden: Tensor, mask: Tensor | None, bias: Tensor | None, cache: Cache, kwargs: dict[str, object]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the output [B, Q, E], the bias with the mask in it [B, H, Q, K], and the weights."""
        module: Any = self
        past = 0 if cache is None else cache.get_seq_length(module.layer_idx)
        shape = (*hidden.shape[:-1], module.n_heads, module.key_value_proj_dim)
        query, key, value = (project(hidden).view(shape).transpose(1, 2) for project in (module.q, module.k, module.v))
        cache = self_attention_cache(cache)
        if cache is not None:
            key, value = cache.update(key, value, module.layer_idx)
        if self.native_positions:
            if bias is None:
                bias = module.compute_bias(hidden.shape[1], key.shape[2], hidden.device, past)
                bias = bias if mask is None else bias + mask
            mask = bias
        kwargs.setdefault("is_causal", self.is_decoder)
        out, weights = self.attend(query, key, value, mask, scaling=1.0, dropout=module.dropout, **kwargs)
        return module.o(out), bias, weights


class T5Interface(_T5Kind, T5Attention):
    """T5Attention as self-attention, through the AttentionInterface."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        mask: Tensor | None,
        position_bias: Tensor | None,
        cache: Cache,
        key_value_states: None = None,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor | None, ...]:
        """Return the output [B, Q, E], the bias for the next layers, and the weights if `output_attentions`."""
        outputs = self._attended(hidden_states, mask, position_bias, cache, kwargs)
        return outputs if output_attentions else outputs[:2]


class MT5Interface(_T5Kind, MT5Attention):
    """MT5Attention as self-attention, through the AttentionInterface."""

    attention = T5Interface.attention


class LongT5Interface(_T5Kind, LongT5Attention):
    """LongT5Attention, of the decoder, as self-attention through the AttentionInterface."""

    attention = T5Interface.attention


class UMT5Interface(_T5Kind, UMT5Attention):
    """UMT5Attention as self-attention, through the AttentionInterface: each layer has its own bias."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        cache: Cache,
        attention_mask: Tensor | None,
        encoder_hidden_states: None = None,
        **kwargs: object,
    ) -> tuple[Tensor | None, ...]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        out, _, weights = self._attended(hidden_states, attention_mask, None, cache, kwargs)
        return out, weights
