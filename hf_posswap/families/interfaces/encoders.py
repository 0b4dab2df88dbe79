"""Attention of encoders: BERT's former self-attention and its variants, DeBERTa, MPNet, LayoutLM, SigLIP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.big_bird.modeling_big_bird import BigBirdSelfAttention
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import BigBirdPegasusSelfAttention
from transformers.models.clip.modeling_clip import CLIPAttention
from transformers.models.clip.modeling_clip import eager_attention_forward as eager_clip
from transformers.models.convbert.modeling_convbert import ConvBertSelfAttention
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.layoutlm.modeling_layoutlm import LayoutLMSelfAttention
from transformers.models.layoutlm.modeling_layoutlm import eager_attention_forward as eager_layoutlm
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertSelfAttention
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention
from transformers.models.rembert.modeling_rembert import RemBertSelfAttention
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention
from transformers.models.siglip.modeling_siglip import SiglipAttention
from transformers.models.squeezebert.modeling_squeezebert import SqueezeBertSelfAttention

from hf_posswap.compat.transformers_calls import self_attention_cache
from hf_posswap.families.interfaces.base import CausalIfDecoder, ThroughInterface


class BertLike(CausalIfDecoder):
    """BERT's former self-attention; mixed into a native class with `query`, `key` and `value`, before it."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        cache: Any,
        encoder_hidden_states: None = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
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
        self, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
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


class RoFormerInterface(BertLike, RoFormerSelfAttention):
    """RoFormerSelfAttention as self-attention, through the AttentionInterface.

    Its encoder makes interleaved rotary positions, applied inside attention.
    """

    def attention(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        sinusoidal_pos: Tensor | None,
        cache: Any,
        encoder_hidden_states: None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        kwargs["sinusoidal_pos"] = sinusoidal_pos
        return super().attention(hidden_states, attention_mask=attention_mask, cache=cache, **kwargs)

    def placed(
        self, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, [B, H, Q, D] each, rotated: the values too, where the config says so."""
        angles = kwargs.pop("sinusoidal_pos")
        if not self.native_positions or angles is None:
            return query, key, value
        rotated = [query, key, value] if self.rotary_value else [query, key]
        query, key, *rest = self.apply_rotary_position_embeddings(angles, *rotated)
        return query, key, rest[0] if rest else value


class ConvBertInterface(ThroughInterface, ConvBertSelfAttention):
    """ConvBertSelfAttention, its attending heads through the AttentionInterface.

    The other heads convolve with kernels computed from the tokens.
    """

    is_causal = False

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        encoder_hidden_states: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        projected = self.query(hidden_states)
        query = projected.view(shape).transpose(1, 2)  # [B, H, Q, D]
        key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in (self.key, self.value))
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=self.attention_head_size**-0.5, dropout=self.dropout.p, **kwargs
        )
        return torch.cat((out, self._convolved(hidden_states, projected)), dim=-1), weights

    def _convolved(self, hidden: Tensor, query: Tensor) -> Tensor:
        """Return the output of the convolving heads, [B, Q, H D]; `query` is not split into heads yet."""
        kernel_states = self.key_conv_attn_layer(hidden.transpose(1, 2)).transpose(1, 2) * query
        kernels = self.conv_kernel_layer(kernel_states).unflatten(-1, (-1, self.conv_kernel_size)).softmax(dim=-1)
        reach = (self.conv_kernel_size - 1) // 2
        padded = nn.functional.pad(self.conv_out_layer(hidden), (0, 0, reach, reach))
        windows = padded.unfold(1, self.conv_kernel_size, 1)  # [B, Q, H D, W]
        windows = windows.unflatten(2, (self.num_attention_heads, -1))  # [B, Q, H, D, W]
        return (windows @ kernels[..., None]).flatten(2)


class MPNetInterface(ThroughInterface, MPNetSelfAttention):
    """MPNetSelfAttention, through the AttentionInterface; its encoder makes a T5-like bias for all layers."""

    is_causal = False

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        position_bias: Tensor | None,
        output_attentions: bool = False,
        **kwargs: Any,
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


class SqueezeBertInterface(ThroughInterface, SqueezeBertSelfAttention):
    """SqueezeBertSelfAttention, through the AttentionInterface.

    Its projections are convolutions of width 1, over channels before tokens.
    """

    is_causal = False
    returns_scores = True

    @staticmethod
    def tokens_first(hidden: Tensor) -> Tensor:
        """Return the input [B, E, Q] of this module in the usual order, [B, Q, E]."""
        return hidden.transpose(1, 2)

    def attention(
        self, hidden_states: Tensor, *, attention_mask: Tensor | None, output_attentions: bool, **kwargs: Any
    ) -> dict[str, Tensor | None]:
        """Return the output [B, E, Q] and, if `output_attentions`, the scores [B, H, Q, K] that eager code has."""
        projections = (self.query, self.key, self.value)
        query, key, value = (self.transpose_for_scores(project(hidden_states)) for project in projections)
        out, scores = self.attend(
            query, key, value, attention_mask, scaling=self.attention_head_size**-0.5, dropout=self.dropout.p, **kwargs
        )
        context: dict[str, Tensor | None] = {"context_layer": out.transpose(1, 2)}
        return context | {"attention_score": scores} if output_attentions else context


class _Disentangled(ThroughInterface):
    """Base of both versions of DeBERTa: masks are per token pair, and the relative bias is added to the scores.

    Content attends to content, and both to relative positions, which may be switched off.
    """

    is_causal = False

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, relative: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E], and the weights [B, H, Q, K] if `output_attentions`.

        Args:
            query: [B, H, Q, D].
            key: [B, H, K, D].
            value: [B, H, K, D].
            mask: nonzero where a token attends, [B, 1, Q, K].
            relative: what is added to the scaled scores, [B, H, Q, K], or None.
            kwargs: for the attention function.
        """
        returns_weights = kwargs.pop("output_attentions")
        dropout: Any = self.dropout  # type: ignore[attr-defined]
        bias = query.new_zeros(()) if relative is None else relative
        additive = torch.where(mask.bool(), bias, torch.finfo(query.dtype).min)
        out, weights = self.attend(query, key, value, additive, dropout=dropout.p, **kwargs)
        return out, weights if returns_weights else None


class DebertaInterface(_Disentangled, modeling_deberta.DisentangledSelfAttention):
    """DisentangledSelfAttention of DeBERTa, through the AttentionInterface."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor,
        relative_pos: Tensor | None,
        rel_embeddings: Tensor | None,
        output_attentions: bool = False,
        query_states: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E], and the weights [B, H, Q, K] if `output_attentions`."""
        query, key, value = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)
        query = query + self.transpose_for_scores(self.q_bias[None, None, :])
        value = value + self.transpose_for_scores(self.v_bias[None, None, :])
        factor = 1 + len(self.pos_att_type)
        scaling = float(query.shape[-1] * factor) ** -0.5
        relative = None
        if self.relative_attention and rel_embeddings is not None and relative_pos is not None:
            rows = self.pos_dropout(rel_embeddings)
            relative = self.disentangled_att_bias(query * scaling, key, relative_pos, rows, factor)
        kwargs |= {"scaling": scaling, "output_attentions": output_attentions}
        return self._attended(query, key, value, attention_mask, relative, **kwargs)


class DebertaV2Interface(_Disentangled, modeling_deberta_v2.DisentangledSelfAttention):
    """DisentangledSelfAttention of DeBERTa-v2 and v3, through the AttentionInterface."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor,
        relative_pos: Tensor | None,
        rel_embeddings: Tensor | None,
        output_attentions: bool = False,
        query_states: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E], and the weights [B, H, Q, K] if `output_attentions`."""
        heads = self.num_attention_heads
        projections = (self.query_proj, self.key_proj, self.value_proj)
        query, key, value = (self.transpose_for_scores(project(hidden_states), heads) for project in projections)
        factor = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        relative: Any = None
        if self.relative_attention and factor > 1:
            rows = self.pos_dropout(rel_embeddings)
            relative = self.disentangled_attention_bias(query, key, relative_pos, rows, factor)
            relative = relative.unflatten(0, (-1, heads))
        query, key, value = (states.unflatten(0, (-1, heads)) for states in (query, key, value))  # [B, H, Q, D]
        kwargs |= {"scaling": float(query.shape[-1] * factor) ** -0.5, "output_attentions": output_attentions}
        return self._attended(query, key, value, attention_mask, relative, **kwargs)


class LayoutLMInterface(LayoutLMSelfAttention):
    """LayoutLMSelfAttention, which has the interface, marked as an encoder's: no mask means bidirectional attention."""

    is_causal = False
    eager_attention = staticmethod(eager_layoutlm)


class SiglipInterface(SiglipAttention):
    """SiglipAttention, which has the interface, with the forward of CLIP's, which passes its keyword arguments on."""

    forward = CLIPAttention.forward  # type: ignore[assignment]  # it names its keyword arguments
    eager_attention = staticmethod(eager_clip)
