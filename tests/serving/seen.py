"""What a test of an engine saw, for the table of the page on serving: pytest's --junitxml keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Record = Callable[[str, object], None]
"""pytest's record_property."""


@dataclass(frozen=True)
class Seen:
    """What an engine made of one swapped model.

    Attributes:
        engine: with its version.
        model: the model type.
        swap: the scheme with its numbers; "none".
        lengths: of the texts, in tokens.
        apart: how far log probabilities were from those of transformers and hf_posswap at most, in nats.
        same: greedy tokens that were the same as generate's.
        tokens: greedy tokens in all.
    """

    engine: str
    model: str
    swap: str
    lengths: list[int]
    apart: float
    same: int
    tokens: int

    def keep(self, record: Record) -> None:
        """Have pytest write it down."""
        record("seen", json.dumps(asdict(self)))


def swap_words(scheme: str | None, options: dict[str, Any]) -> str:
    """Return a scheme with its numbers and words, as the table shows it; its lists are left out.

    Example:
        >>> swap_words("dynamic", {"factor": 4.0, "follow": "query"})
        'dynamic (factor=4, follow=query)'
    """
    stated = {name: value for name, value in options.items() if isinstance(value, (int, float, str))}
    words = ", ".join(f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in stated.items())
    return f"{scheme or 'none'}{f' ({words})' if words else ''}"
