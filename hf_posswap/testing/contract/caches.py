"""How the models of a release of transformers take a cache."""

from __future__ import annotations

import inspect
from typing import Any

from hf_posswap.compat.transformers_calls import CACHE_NAMES, cache_argument, forward_parameters


def with_cache(module: Any, cache: Any) -> dict[str, Any]:
    """Return the argument by which the forward of `module`, a model or a layer of one, is given `cache`."""
    return {cache_argument(module): cache}


def takes_cache(cls: type) -> bool:
    """Return whether the forward of the class takes a cache: an annotation says so, or one of the names it has had."""
    parameters = forward_parameters(cls).items()
    return any(
        name in CACHE_NAMES or "Cache" in inspect.formatannotation(parameter.annotation)
        for name, parameter in parameters
    )
