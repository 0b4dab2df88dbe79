"""In which form the layers of a cache hold the keys that a scheme gives them."""

from __future__ import annotations

from typing import Any

import torch

from hf_posswap.schemes.common.piece import Keys
from hf_posswap.schemes.mechanism import Mechanism


def keys_of(cache: Any, layer: int | None, mechanism: Mechanism, device: torch.device) -> Keys:
    """Return how the keys come that layer `layer` of `cache` gives, and is to be given; None: there is no cache.

    Copies cost memory, and the time of all that moves with it; one key of each token costs the turning of those that
    are near, which only a CPU that is not compiling knows. What a layer holds already is gone on with: some caches were
    given their shape, that of one key a token, before the first key came.
    """
    if cache is None or not mechanism.stores_rotated_keys or not (mechanism.rotates or mechanism.keys_per_token > 1):
        return "raw"
    if mechanism.rotates:  # `layer` is not looked at: layers that are compiled one by one then share a graph
        return "rotated"
    single: Keys = "far" if mechanism.turns_on else "raw"
    layers = getattr(cache, "layers", ())
    found = layers[layer] if layer is not None and layer < len(layers) else None
    held = getattr(found, "keys", None)
    if held is not None and held.dim() == 4:
        return single if held.shape[-1] == mechanism.head_dim else "copies"
    grows = not hasattr(found, "max_cache_len") and not torch.compiler.is_compiling()
    return "far" if mechanism.turns_on and grows and device.type == "cpu" else "copies"
