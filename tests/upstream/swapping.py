"""Model classes that build swapped models, in the place of the stock ones."""

from __future__ import annotations

from typing import Any

import hf_posswap
from hf_posswap.patching.record.model_class import swapped_class
from hf_posswap.patching.record.record import native_config_class
from tests.upstream.families import Family


class _Swapping(type):
    """Makes a call of the class give a stock model that is swapped."""

    family: Family
    stock: type

    def __call__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        if carries_swap(config):
            return swapped_class(cls.stock)(config, *args, **kwargs)
        return hf_posswap.patch_model(cls.stock(config, *args, **kwargs), cls.family.scheme, **cls.family.options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.stock)


def carries_swap(config: Any) -> bool:
    """Return whether `config` is that of a model that only hf_posswap can run."""
    return native_config_class(config) is not type(config)


def swapping_class(stock: Any, family: Family) -> type:
    """Return a class of the name of `stock` whose calls give models of it that are swapped as `family` says.

    From the config of a swapped model, and from a folder, models are made by the class that swapped models are of:
    `type(model)(model.config)` and `type(model).from_pretrained(folder)` are what a user of one calls.
    """

    def from_config(config: Any, **options: Any) -> Any:
        if carries_swap(config):
            return swapped_class(stock)._from_config(config, **options)
        return hf_posswap.patch_model(stock._from_config(config, **options), family.scheme, **family.options)

    def from_pretrained(*args: Any, **options: Any) -> Any:
        cls = stock if family.native else swapped_class(stock)
        return cls.from_pretrained(*args, **options)

    body = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "family": family,
        "stock": stock,
        "from_pretrained": staticmethod(from_pretrained),
        "_from_config": staticmethod(from_config),
        "forward": stock.forward,
    }
    return _Swapping(stock.__name__, (stock,), body)
