"""ConvBERT: some heads attend, the others convolve with kernels computed from the tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.convbert.modeling_convbert import ConvBertSelfAttention

from hf_posswap.families.interfaces.base import ThroughInterface


class ConvBertInterface(ThroughInterface, ConvBertSelfAttention):
    """ConvBertSelfAttention, its attending heads through the AttentionInterface."""

    is_causal = False

    def attention(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        encoder_hidden_states: None = None,
        **kwargs: object,
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
