"""Model classes that build swapped models, in the place of the stock ones."""

from __future__ import annotations

from typing import Any

import hf_posswap
from tests.upstream.families import Family


class _Swapping(type):
    """Makes a call of the class give a stock model that is swapped."""

    family: Family
    stock: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        model = cls.stock(*args, **kwargs)
        if getattr(model, "_posswap", None) is None:
            hf_posswap.patch_model(model, cls.family.scheme, **cls.family.options)
        return model

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.stock)


def swapped_class(stock: type, family: Family) -> type:
    """Return a class of the name of `stock` whose calls give models of it that are swapped as `family` says.

    `from_pretrained` and `_from_config` are those of `stock`: what loads a folder is what a user would call.
    """

    def from_config(config: Any, **options: Any) -> Any:
        model = stock._from_config(config, **options)  # type: ignore[attr-defined]
        if getattr(model, "_posswap", None) is None:
            hf_posswap.patch_model(model, family.scheme, **family.options)
        return model

    body = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "family": family,
        "stock": stock,
        "from_pretrained": stock.from_pretrained,  # type: ignore[attr-defined]
        "_from_config": staticmethod(from_config),
        "forward": stock.forward,  # type: ignore[attr-defined]
    }
    return _Swapping(stock.__name__, (stock,), body)
