"""The scheme between a served model's projections and vLLM's attention, with its paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_posswap.compat.transformers_attention import IMPLEMENTATION, attention_function, register_attention_function
from hf_posswap.patching.sites.attention.call import CALL_ARGUMENT, AttentionCall
from hf_posswap.patching.sites.attention.function import ConfigView

SERVED = "posswap_vllm"
"""The registered name of the attention of served models."""


class ServedView(ConfigView):
    """The config view of a served attention module, which selects the attention that rotates before vLLM's."""

    def __getattr__(self, name: str) -> Any:
        return SERVED if name == IMPLEMENTATION else super().__getattr__(name)


def served_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Apply the scheme of `module` to q [1, H, T, D] and k [1, G, T, D], then call vLLM's attention.

    The T new tokens of all texts of a batch are in one row; each is rotated at its own position, and vLLM caches the
    rotated keys. A bias by ALiBi's slopes is in the vLLM attention of `module`.

    Returns:
        The output, [1, T, H, D], and None.
    """
    call: AttentionCall = kwargs.pop(CALL_ARGUMENT)
    query, key = call.rotate(query, key)
    query = call.scaled(query)
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
