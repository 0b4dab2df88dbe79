"""Whether an attention module is of the class that an interface class stands for."""

from __future__ import annotations

from torch import nn


def fitting(module: nn.Module, cls: type) -> type | str:
    """Return `cls` if the forward of `module` is the one that `cls` replaces, otherwise why it is not."""
    native = cls.__bases__[-1]
    if type(module) is native or type(module) is cls:
        return cls
    return f"its class is {type(module).__name__}, and only {native.__name__} is known to equal {cls.__name__}"
