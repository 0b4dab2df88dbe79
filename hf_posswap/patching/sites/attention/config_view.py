"""A thin view of a model's config that names the plugin's attention function, for one attention module."""

from __future__ import annotations

import zlib
from typing import Any

from hf_posswap.compat.transformers_attention import IMPLEMENTATION

# Code from a checkpoint has another name: several versions of the package may run in one process.
ATTENTION_NAME = "posswap" if __name__.startswith("hf_posswap.") else f"posswap_{zlib.crc32(__name__.encode()):08x}"


class ConfigView:
    """The config of a patched attention module.

    The name of the attention implementation is the plugin's; every other attribute is read from, and written to, the
    model's own config, so the model's `set_attn_implementation` still works. Copies and pickles like any object.
    """

    def __init__(self, native: Any) -> None:
        object.__setattr__(self, "native", native)

    def __getattr__(self, name: str) -> Any:
        if name == IMPLEMENTATION:
            return ATTENTION_NAME
        if name == "native" or (name.startswith("__") and name.endswith("__")):  # while being unpickled or copied
            raise AttributeError(name)
        return getattr(self.native, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.native, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {"native": self.native}

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "native", state["native"])

    def __repr__(self) -> str:
        return f"ConfigView({type(self.native).__name__})"
