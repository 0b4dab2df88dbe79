"""The class of swapped models in vLLM: its Transformers backend around a swapped model, its scheme before attention."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.transformers_attention import IMPLEMENTATION, attention_function, register_attention_function
from hf_posswap.compat.transformers_loading import ignore_on_load, ignored_on_load
from hf_posswap.errors import CheckpointError, ModelInUseError, SwapVerificationError, UnsupportedSwapError
from hf_posswap.integrations.vllm.guard import HEAD_NAME, head_name
from hf_posswap.integrations.vllm.paged_attention import (
    LayerSettings,
    PagedBatch,
    attend_paged,
    stored_keys,
    write_keys,
)
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.inspect.describe import model_class_of
from hf_posswap.patching.inspect.paged import needs_own_attention, slopes_of
from hf_posswap.patching.record.model_class import MARKED, native_class
from hf_posswap.patching.record.refusals import stock_name, unmark
from hf_posswap.patching.sites.attention.call import CALL_ARGUMENT, AttentionCall
from hf_posswap.patching.sites.attention.edits import PatchAttention
from hf_posswap.patching.sites.attention.function import ConfigView
from hf_posswap.schemes.mechanism import Mechanism

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm.model_executor.models.utils import WeightsMapper
    from vllm.v1.attention.backend import CommonAttentionMetadata

SERVED = "posswap_vllm"
"""The registered name of the attention of served models."""


class ServedView(ConfigView):
    """The config view of a served attention module, which selects the attention that rotates before vLLM's."""

    def __getattr__(self, name: str) -> Any:
        return SERVED if name == IMPLEMENTATION else super().__getattr__(name)


def served_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **kwargs: Any
) -> tuple[Tensor, None]:
    """Apply the scheme of `module` to q [1, H, T, D] and k [1, G, T, D], then call vLLM's attention.

    The T new tokens of all texts of a batch are in one row; each is rotated at its own position, and vLLM caches the
    rotated keys. A bias by ALiBi's slopes is in the vLLM attention of `module`; what else changes the scores is in the
    backend of that attention (`scheme_backend`).

    Returns:
        The output, [1, T, H, D], and None.
    """
    call: AttentionCall = kwargs.pop(CALL_ARGUMENT)
    call.used = True
    query, key = call.rotate(query, key)
    query = call.scaled(query)
    if needs_own_attention(call.mechanism):
        key = stored_keys(call, key)
    output, _ = attention_function("vllm", None)(module, query, key, value, attention_mask, **kwargs)  # [T, H D]
    return output.view(len(query), query.shape[2], query.shape[1], -1), None


def serve_attention(model: nn.Module) -> None:
    """Let the patched attention modules of `model` attend through vLLM."""
    register_attention_function(SERVED, served_attention)
    for module in patched(model):
        module.config = ServedView(module.config.native)


@contextmanager
def true_configs(model: nn.Module) -> Iterator[None]:
    """Restore the native config of the patched attention modules inside the block, because vLLM reads it."""
    views = {module: module.config for module in patched(model)}
    for module, view in views.items():
        module.config = view.native
    try:
        yield
    finally:
        for module, view in views.items():
            module.config = view


def patched(model: nn.Module) -> list[Any]:
    """Return the attention modules of `model` that a swap patched."""
    return [module for module in model.modules() if isinstance(getattr(module, "config", None), ConfigView)]


class ServedSwap:
    """Mixin for a class of vLLM's Transformers backend whose `self.model` is a swapped base model."""

    model: PreTrainedModel
    config: Any
    hf_to_vllm_mapper: WeightsMapper

    def __init__(self, *, vllm_config: object, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        if type(self.model).__call__ is not nn.Module.__call__:
            raise ModelInUseError(
                f"vLLM has compiled {type(self.model).__name__} for another model of this process, past the hooks that "
                "a swapped one needs: serve it in a separate process."
            )
        for edit in applied_swap(self.model).plan.edits:
            problem = edit.check(self.model)
            if problem is not None:
                raise SwapVerificationError(f"vLLM changed a swapped model while loading it: {edit.path}: {problem}.")

    def _decorate_for_torch_compile(self) -> None:
        """Do not compile the model: vLLM's compiled calls bypass the hooks that pass positions to attention."""

    def _create_hf_to_vllm_mapper(self) -> None:
        _ignore_exactly(self.model)
        config = self.config
        self.config = SimpleNamespace(architectures=[stock_name(name) for name in config.architectures])
        try:  # weights that transformers renamed are found by the name of the class: GPT-NeoX's embed_out
            super()._create_hf_to_vllm_mapper()  # type: ignore[misc]
        finally:
            self.config = config
        self._names = self.hf_to_vllm_mapper  # before vLLM fuses layers
        self._expected = {f"model.{name}" for name, _ in self.model.named_parameters()}

    def recursive_replace(self) -> None:
        with true_configs(self.model):
            super().recursive_replace()  # type: ignore[misc]
        serve_attention(self.model)

    def _get_attn_cls(self) -> object:
        native = super()._get_attn_cls()  # type: ignore[misc]
        mechanisms = dict(_mechanisms(self.model))

        def attention(*, prefix: str, **kwargs: object) -> Any:
            mechanism = next((each for path, each in mechanisms.items() if f"model.{path}." in prefix), None)
            if mechanism is not None and needs_own_attention(mechanism):
                return native(prefix=prefix, attn_backend=scheme_backend(), mechanism=mechanism, **kwargs)
            slopes = None if mechanism is None else slopes_of(mechanism)
            if slopes is None:
                return native(prefix=prefix, **kwargs)
            attention_module = native(prefix=prefix, alibi_slopes=slopes.tolist(), **kwargs)
            if getattr(attention_module.impl, "alibi_slopes", None) is None:
                raise SwapVerificationError(f"{type(attention_module.impl).__name__} of vLLM drops ALiBi's slopes.")
            return attention_module

        return attention

    def init_parameters(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        for part in module.modules():
            if isinstance(part, Mechanism):  # float32, whatever the dtype of the model: as hf_posswap.load has them
                super().init_parameters(part, torch.float32)  # type: ignore[misc]
        super().init_parameters(module, dtype)  # type: ignore[misc]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        native_head = head_name(native_class(model_class_of(self.config)))
        seen: set[str] = set()

        def watched() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in _as_built(self.model, native_head, weights):
                seen.update(mapped for mapped, _ in self._names.apply([(name, tensor)]))
                yield name, tensor

        loaded = super().load_weights(watched())  # type: ignore[misc]
        missing = sorted(self._expected - seen)
        if missing:  # vLLM does not check it for fused layers
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} weights of its model, including {', '.join(missing[:4])}: "
                "download it again, or use a complete copy of its weights."
            )
        return loaded


def _mechanisms(model: Any) -> Iterator[tuple[str, Mechanism]]:
    """Yield the path of each attention module that the swap of `model` patched, and its mechanism in the model."""
    for edit in applied_swap(model).plan.edits:
        if isinstance(edit, PatchAttention):
            mechanism = model.get_submodule(edit.carried)
            yield edit.path, mechanism.for_layer(edit.layer)


@functools.cache
def _model_class() -> type:
    from vllm.model_executor.models.transformers import TransformersForCausalLM

    return type("PosswapForCausalLM", (ServedSwap, TransformersForCausalLM), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "PosswapForCausalLM":  # created on demand, because it needs vLLM
        return _model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _ignore_exactly(model: PreTrainedModel) -> None:
    """Restrict patterns of ignored weights so that they match no weight of `model`: GPT-2's attn.bias, c_attn.bias."""
    names = [name for name, _ in model.named_parameters()]
    patterns = ignored_on_load(model)
    ignore_on_load(
        model,
        [rf"(^|\.){pattern}$" if any(re.search(pattern, name) for name in names) else pattern for pattern in patterns],
    )


def _as_built(model: nn.Module, head: str, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a swapped checkpoint in the shapes of `model`, and those of the `head` by vLLM's name.

    Buffers are loaded here, because vLLM does not load them.
    """
    prefix, marked = f"{model.base_model_prefix}.", vars(model).get(MARKED, {})
    buffers = dict(model.named_buffers())
    for name, tensor in weights:
        key = name.removeprefix(prefix)
        state = {key: tensor}
        unmark(state, marked)
        if key not in buffers:
            yield re.sub(rf"^{re.escape(head)}\.", f"{HEAD_NAME}.", name), state[key]
            continue
        if tensor.shape != buffers[key].shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)} in the checkpoint and {list(buffers[key].shape)} in the "
                "swapped model: take the weights and the config.json of one checkpoint."
            )
        owner, _, leaf = key.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, leaf, tensor.to(dtype=buffers[key].dtype))


BACKEND = "CUSTOM"
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
        layer: int,
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


def batch_of(metadata: CommonAttentionMetadata) -> PagedBatch:
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
def scheme_backend() -> type:
    """Return the backend, a class of vLLM."""
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

    class Builder(AttentionMetadataBuilder):
        """Reads the requests of each forward."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)

        def build(self, common_prefix_len: int, common_attn_metadata: object, fast_build: bool = False) -> PagedBatch:
            return batch_of(common_attn_metadata)

    implementation = type("SchemeAttentionImpl", (SchemeAttention, AttentionImpl), {"__module__": __name__})

    class Backend(AttentionBackend):
        """Attention by the scheme of each layer."""

        supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
        supported_kv_cache_dtypes = ["auto"]

        @staticmethod
        def get_name() -> str:
            return BACKEND

        @staticmethod
        def get_impl_cls() -> type:
            return implementation

        @staticmethod
        def get_builder_cls() -> type:
            return Builder

        @classmethod
        def supports_sliding_window(cls) -> bool:
            return True

    return Backend
