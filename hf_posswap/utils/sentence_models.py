"""Models of sentence-transformers: the transformers model inside, and the length at which they truncate texts."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hf_posswap.errors import UnsupportedSwapError

ANY_KIND = ("SentenceTransformer", "CrossEncoder", "SparseEncoder")
"""Classes of sentence-transformers with a transformers model inside, each of which has a Trainer."""


def is_sentence_model(model: object, kinds: tuple[str, ...] = ANY_KIND[:1]) -> bool:
    """Return whether `model` is of one of `kinds`; sentence-transformers is not imported for it.

    Args:
        model: anything.
        kinds: names of classes. Only a SentenceTransformer is swapped and saved as a whole.

    Example:
        >>> is_sentence_model(nn.Linear(2, 2))
        False
    """
    package = sys.modules.get("sentence_transformers")
    return any(isinstance(model, getattr(package, kind, ())) for kind in kinds)


def inner_model(model: nn.Module) -> Any:
    """Return the transformers model, or the PEFT model around one, inside `model` of sentence-transformers.

    Raises:
        UnsupportedSwapError: there is none, or there are several.
    """
    from transformers import PreTrainedModel

    inner: dict[str, nn.Module] = {}
    for path, module in model.named_modules():  # an outer module comes before those inside it
        is_adapted = hasattr(module, "peft_config") and hasattr(module, "base_model")
        is_inside = not path or any(path.startswith(f"{outer}.") for outer in inner)
        if (is_adapted or isinstance(module, PreTrainedModel)) and not is_inside:
            inner[path] = module
    if len(inner) == 1:
        return next(iter(inner.values()))
    name = type(model).__name__
    if not inner:
        raise UnsupportedSwapError(
            f"this {name} has no transformers model in it (static embeddings, or a model of ONNX or OpenVINO), so "
            "there are no positions to swap."
        )
    paths = ", ".join(f"{path!r} ({type(module).__name__})" for path, module in inner.items())
    raise UnsupportedSwapError(
        f"this {name} has several transformers models, {paths}: give one of them, such as "
        f"model.get_submodule({next(iter(inner))!r}), and set its max_seq_length yourself."
    )
