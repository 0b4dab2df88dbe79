"""Whether an interface class can replace the class of an attention module."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posswap.compat.transformers_calls import forward_parameters


def fitting(module: nn.Module, *classes: type) -> type | str:
    """Return the one of `classes` that replaces the forward of `module`, or why none does and what works."""
    natives = [cls.__bases__[-1] for cls in classes]
    for cls, native in zip(classes, natives, strict=True):
        if type(module) is native or type(module) is cls:
            return _mismatch(cls, native) or cls
    known = ", ".join(f"{n.__name__} is known to equal {c.__name__}" for n, c in zip(natives, classes, strict=True))
    return (
        f"its class is {type(module).__name__}, and only {known}, so a scheme cannot be put inside. "
        "What works: the same model loaded with attn_implementation='eager'."
    )


def _mismatch(cls: Any, native: type) -> str:
    """Return why `cls` cannot replace `native` in the installed release; "": it can."""
    call = getattr(cls, "stock_call", None)
    if call is not None:
        why = call.mismatch
    else:
        now, then = (", ".join(forward_parameters(owner)) for owner in (native, cls))
        why = "" if now == then else f"the forward of {native.__name__} takes {now}, and {cls.__name__} knows {then}"
    return why and (
        f"in this release of transformers {why}, so a scheme cannot be put inside. "
        "What works: a release that hf_posswap was tested with (posswap --version), or a newer hf_posswap."
    )
