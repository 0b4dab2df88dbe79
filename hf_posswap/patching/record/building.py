"""Build the stock model of a swapped one, also where its class patches itself in its constructor."""

from __future__ import annotations

import contextvars
from typing import Any

from hf_posswap.patching.record.model_class import native_class

_building: contextvars.ContextVar[Any] = contextvars.ContextVar("posswap_building", default=None)


class _ReachedSwapError(BaseException):
    """Ends a constructor of the user's own where it would patch `model`, which it builds to plan that very patch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def build_native(model: Any, config: Any) -> Any:
    """Return a fresh model of the class that `model` had before any swap, for a native `config`; see `build_class`."""
    return build_class(native_class(type(model)), config)


def build_class(cls: Any, config: Any) -> Any:
    """Return a fresh model of a stock class, or of a subclass of one, for a native `config`.

    Where the class patches itself in its constructor, the model is returned as it is before that.
    """
    token = _building.set(cls)
    try:
        return cls(config)
    except _ReachedSwapError as reached:
        return reached.model
    finally:
        _building.reset(token)


def stop_if_building(model: Any) -> None:
    """End the construction of `model` here, where it is one that `build_class` makes."""
    if _building.get() is type(model):
        raise _ReachedSwapError(model)
