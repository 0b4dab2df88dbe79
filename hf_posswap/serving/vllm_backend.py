"""The attention backend of vLLM that computes a scheme by hf_posswap's own attention: what it needs of vLLM's classes.

Its cache is vLLM's, [blocks, heads, tokens of a block, 2 D], each key with its value behind it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.serving.paged_attention import LayerSettings, PagedBatch, attend_paged, write_keys

NAME = "CUSTOM"
"""The name that vLLM has for backends that it does not know."""


class SchemeAttention:
    """Mixin for the class of vLLM that attends in one layer.

    Args:
        mechanism: of the layer.
        sinks: of vLLM's layer; must be None.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        *,
        mechanism: Mechanism,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.mechanism = mechanism
        self.settings = LayerSettings(self.scale, sliding_window, logits_soft_cap or None)
        refused = {
            "attention other than a decoder's": str(getattr(attn_type, "value", attn_type)) != "decoder",
            "sinks": sinks is not None,
            "slopes of another bias": alibi_slopes is not None,
            "keys of another layer": kv_sharing_target_layer_name is not None,
            f"a cache in {kv_cache_dtype}": kv_cache_dtype != "auto",
            "a limit on its scores (softcap)": mechanism.splits and self.settings.softcap is not None,
        }
        problem = next((name for name, given in refused.items() if given), None)
        if problem is not None:
            raise UnsupportedSwapError(
                f"vLLM gives a layer {problem}, with which hf_posswap cannot compute its scheme."
            )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedBatch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store new keys and values [T, G, D], and write the attention of `query` [T, H, D] into `output`."""
        if attn_metadata is None:  # vLLM measures memory, or warms up
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedSwapError("vLLM asks for a quantized output of attention, which hf_posswap has not.")
        slots = attn_metadata.slots
        write_keys(kv_cache, key[: len(slots)], value[: len(slots)], slots)
        attend_paged(attn_metadata, self.mechanism, query, kv_cache, output, self.settings)
        return output


def batch_of(metadata: Any) -> PagedBatch:
    """Return the requests of a forward, as vLLM's `CommonAttentionMetadata` has them.

    Raises:
        UnsupportedSwapError: some of them see keys later than their queries.
    """
    if metadata.causal is not True:
        raise UnsupportedSwapError("vLLM asks for attention that is not causal, which hf_posswap does not serve.")
    count = metadata.num_reqs
    return PagedBatch(
        starts=metadata.query_start_loc_cpu[: count + 1].tolist(),
        lengths=metadata.seq_lens[:count].tolist(),
        block_table=metadata.block_table_tensor[:count],
        slots=metadata.slot_mapping[: metadata.num_actual_tokens].long(),
    )


@functools.cache
def scheme_backend() -> Any:
    """Return the backend, a class of vLLM."""
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

    class Builder(AttentionMetadataBuilder):
        """Reads the requests of each forward."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedBatch:
            return batch_of(common_attn_metadata)

    implementation = type("SchemeAttentionImpl", (SchemeAttention, AttentionImpl), {"__module__": __name__})

    class Backend(AttentionBackend):
        """Attention by the scheme of each layer."""

        supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
        supported_kv_cache_dtypes = ["auto"]

        @staticmethod
        def get_name() -> str:
            return NAME

        @staticmethod
        def get_impl_cls() -> Any:
            return implementation

        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

        @classmethod
        def supports_sliding_window(cls) -> bool:
            return True

    return Backend
