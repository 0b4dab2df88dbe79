"""BART's former self-attention, in classes that kept it when BART moved to the interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.models.mvp.modeling_mvp import MvpAttention
from transformers.models.trocr.modeling_trocr import TrOCRAttention
from transformers.models.xglm.modeling_xglm import XGLMAttention

from hf_posswap.compat.transformers_calls import self_attention_cache
from hf_posswap.families.interfaces.base import CausalIfDecoder

if TYPE_CHECKING:
    from transformers import Cache


class BartLike(CausalIfDecoder):
    """Mixed into a native class with `q_proj`, `k_proj`, `v_proj` and `out_proj`, before it."""

    def attention(
        self,
        hidden_states: Tensor,
        *,
        cache: Cache | None,
        attention_mask: Tensor | None,
        key_value_states: None = None,
        attn_prompt: None = None,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, Q, E] and the weights [B, H, Q, K]; None where the implementation keeps none."""
        module: Any = self
        shape = (*hidden_states.shape[:-1], module.num_heads, module.head_dim)
        projections = (module.q_proj, module.k_proj, module.v_proj)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        cache = self_attention_cache(cache)
        if cache is not None:
            key, value = cache.update(key, value, module.layer_idx)
        out, weights = self.attend(
            query, key, value, attention_mask, scaling=module.scaling, dropout=module.dropout or 0.0, **kwargs
        )
        return module.out_proj(out), weights


class MvpInterface(BartLike, MvpAttention):
    """MvpAttention without prompts, as self-attention through the AttentionInterface."""


class TrOCRInterface(BartLike, TrOCRAttention):
    """TrOCRAttention as self-attention, through the AttentionInterface."""


class XGLMInterface(BartLike, XGLMAttention):
    """XGLMAttention as self-attention, through the AttentionInterface."""
