"""Clear errors for configs that no model can be built from, whatever error the model's code raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.format import said_by


@contextmanager
def building_from(config: Any) -> Iterator[None]:
    """Build a model from `config` in the block; an invalid config raises a clear error.

    Raises:
        CheckpointError: names the config's class, its architectures, and the original error.
    """
    try:
        yield
    except PosswapError:
        raise
    except Exception as error:  # a model's own code may raise anything
        named = f" (architectures {config.architectures})" if config.architectures else ""
        message = said_by(error).rstrip(".")
        raise CheckpointError(
            f"no model can be built from this {type(config).__name__}{named}: {type(error).__name__}: {message}. "
            "Check config.json against that of the original model."
        ) from error


def architectures_of(config: Any) -> list[str]:
    """Return the class names in `config.architectures`.

    Raises:
        CheckpointError: it is not a list of names.
    """
    names = config.architectures or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"architectures of this {type(config).__name__} must be a list of class names, got {names!r}: check "
            "config.json."
        )
    return list(names)
