"""Continuous batching of a swapped model: supported if keys are cached in their final form, else refused up front.

transformers' paged cache stores the keys of many requests together and passes attention only the positions of new
tokens; stock rotary modules whose angles follow the length use the longest request's for all. Its worker thread hides
errors, so unsupported models are refused before it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posswap.patching.edits.edit import Refusal
from hf_posswap.schemes.mechanism import Mechanism

if TYPE_CHECKING:
    from torch import nn

KEYS_UNKNOWN = "its scheme needs the positions of cached keys, which a paged cache does not provide"
ONE_LENGTH = "its angles follow the length of the text, and all requests of a batch would use those of the longest one"
START = "init_continuous_batching"
"""The method of a model that every entry point of continuous batching calls."""
REFUSED = (
    "{model} was asked for continuous batching (generate_batch), and {why}. What works: generate; or a scheme that "
    "rotates keys by fixed angles before they are cached (rope, linear, yarn, llama3, xpos, nope)."
)


def needs_key_positions(mechanism: Mechanism) -> bool:
    """Return whether attention with `mechanism` needs the positions of cached keys, not only those of new ones."""
    mechanisms = (module for module in mechanism.modules() if isinstance(module, Mechanism))
    return any(m.biases or m.splits or (m.rotates and not m.stores_rotated_keys) for m in mechanisms)


def refuse_continuous_batching(model: nn.Module, why: str = KEYS_UNKNOWN) -> None:
    """Make `model` refuse continuous batching, for the reason `why`."""
    if hasattr(model, START):
        setattr(model, START, Refusal(type(model).__name__, why, REFUSED))


def allow_continuous_batching(model: nn.Module) -> None:
    """Restore continuous batching of the class of `model`."""
    vars(model).pop(START, None)
