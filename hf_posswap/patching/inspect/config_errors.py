"""Configs that no model can be built from: said as what they are, whatever the model's own code trips over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.format import said_by


@contextmanager
def building_from(config: Any) -> Iterator[None]:
    """Build a model from `config` in the block: no number of heads, a class of another config, and so on, are refused.

    Raises:
        CheckpointError: names the config's class, the architectures that it names, and what went wrong.
    """
    try:
        yield
    except PosswapError:
        raise
    except Exception as error:  # a model's own code may raise anything
        named = f" (architectures {config.architectures})" if config.architectures else ""
        said = said_by(error).rstrip(".")
        raise CheckpointError(
            f"no model can be built from this {type(config).__name__}{named}: {type(error).__name__}: {said}. "
            "Check config.json against that of the model it was made from."
        ) from error


def architectures_of(config: Any) -> list[str]:
    """Return the names of classes that `config` says its checkpoint is of.

    Raises:
        CheckpointError: they are no list of names.
    """
    names = config.architectures or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"architectures of this {type(config).__name__} must be a list of class names, got {names!r}: check "
            "config.json."
        )
    return list(names)
