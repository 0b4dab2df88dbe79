"""Continuous batching of a swapped model: served where keys are cached as they are used, refused up front elsewhere.

transformers' paged cache holds the keys of many requests side by side and tells attention of the positions of the new
tokens alone; stock rotary modules whose angles follow the length take the longest request's for all. Its worker thread
keeps errors to itself, so what cannot be served is refused before there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.schemes.mechanism import Mechanism

KEYS_UNKNOWN = "its scheme needs the positions of cached keys, which a paged cache does not tell"
ONE_LENGTH = "its angles follow the length of the text, and all requests of a batch would have those of the longest one"
START = "init_continuous_batching"
"""The method of a model through which every way into continuous batching goes."""


def needs_key_positions(mechanism: Mechanism) -> bool:
    """Return whether attention with `mechanism` asks where cached keys stand, and not where new ones do alone."""
    parts = (part for part in mechanism.modules() if isinstance(part, Mechanism))
    return any(part.biases or part.splits or (part.rotates and not part.stores_rotated_keys) for part in parts)


@dataclass
class Refusal:
    """Stands in a model for the method `init_continuous_batching`.

    Attributes:
        model: name of the model's class.
        why: it cannot be right, as the rest of a sentence.
    """

    model: str
    why: str = KEYS_UNKNOWN

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedSwapError: always.
        """
        raise UnsupportedSwapError(
            f"{self.model} was asked for continuous batching (generate_batch), and {self.why}. What works: generate; "
            "or a scheme that rotates keys by fixed angles before they are cached (rope, linear, yarn, llama3, xpos, "
            "nope)."
        )


def refuse_continuous_batching(model: Any, why: str = KEYS_UNKNOWN) -> None:
    """Make `model`, which cannot be right under continuous batching because of `why`, refuse it."""
    if hasattr(model, START):
        setattr(model, START, Refusal(type(model).__name__, why))


def allow_continuous_batching(model: Any) -> None:
    """Let the class of `model` say again how it is batched."""
    vars(model).pop(START, None)
