"""In which form the layers of a cache hold the keys that a scheme gives them."""

from __future__ import annotations

from typing import Any

import torch

from hf_posswap.schemes.common.piece import Keys
from hf_posswap.schemes.mechanism import Mechanism


def keys_of(cache: Any, layer: int | None, mechanism: Mechanism, device: torch.device) -> Keys:
    """Return the form in which layer `layer` of `cache` stores keys.

    Copies cost memory and the time to move it; one key for each token costs rotating the near ones, which is known only
    on a CPU without compilation. The form that a layer already has is kept: some caches get their shape, that of one
    key a token, before the first key.
    """
    if cache is None or not mechanism.stores_rotated_keys or not (mechanism.rotates or mechanism.keys_per_token > 1):
        return "raw"
    if mechanism.rotates:  # `layer` is not looked at: layers that are compiled one by one then share a graph
        return "rotated"
    single: Keys = "far" if mechanism.turns_on else "raw"
    layers = getattr(cache, "layers", ())
    cache_layer = layers[layer] if layer is not None and layer < len(layers) else None
    keys = getattr(cache_layer, "keys", None)
    if keys is not None and keys.dim() == 4:
        return single if keys.shape[-1] == mechanism.head_dim else "copies"
    grows = not hasattr(cache_layer, "max_cache_len") and not torch.compiler.is_compiling()
    return "far" if mechanism.turns_on and grows and device.type == "cpu" else "copies"
