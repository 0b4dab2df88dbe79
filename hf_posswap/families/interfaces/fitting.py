"""Whether an attention module is of the class that an interface class stands for."""

from __future__ import annotations

from torch import nn


def fitting(module: nn.Module, *classes: type) -> type | str:
    """Return which of `classes` replaces the forward that `module` has, or why none does."""
    natives = [cls.__bases__[-1] for cls in classes]
    for cls, native in zip(classes, natives, strict=True):
        if type(module) is native or type(module) is cls:
            return cls
    known = ", ".join(f"{n.__name__} is known to equal {c.__name__}" for n, c in zip(natives, classes, strict=True))
    return f"its class is {type(module).__name__}, and only {known}"
