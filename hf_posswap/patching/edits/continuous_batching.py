"""Continuous batching of a swapped model: supported where each request's positions can be known, else refused up front.

transformers' paged cache gives attention the keys of many requests side by side, and says where each request's keys
end: so biases and several rotations know where keys stand. Angles that follow the length of a text would be the longest
request's for all. A worker thread hides errors, so what is unsupported is refused before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_posswap.compat.transformers_calls import tells_paged_positions
from hf_posswap.patching.edits.edit import Refusal
from hf_posswap.schemes.mechanism import Mechanism

if TYPE_CHECKING:
    from torch import nn

KEYS_UNKNOWN = (
    "its scheme needs the positions of cached keys, which the paged cache of this release of transformers, or of this "
    "attention implementation, does not provide"
)
ONE_LENGTH = "its angles follow the length of the text, and all requests of a batch would use those of the longest one"
START = "init_continuous_batching"
"""The method of a model that every entry point of continuous batching calls."""
REFUSED = (
    "{model} was asked for continuous batching (generate_batch), and {why}. What works: generate; or a scheme that "
    "rotates keys by fixed angles before they are cached (rope, linear, yarn, llama3, xpos, nope); from transformers "
    "5.19 on, with sdpa or eager, also biases and several rotations by fixed angles (alibi, t5, self_extend)."
)


def asks_where_keys_stand(mechanism: Mechanism) -> bool:
    """Return whether attention with `mechanism` needs the positions of cached keys, not only those of new ones."""
    return any(m.biases or m.splits for m in mechanism.modules() if isinstance(m, Mechanism))


def why_not_paged(mechanism: Mechanism, arguments: Mapping[str, object] | None = None) -> str | None:
    """Return why attention with `mechanism` cannot have a cache that holds many requests side by side; None: it can.

    Args:
        mechanism: of a layer, or of all.
        arguments: of a call of an attention module; None: there is none yet.
    """
    if any(m.rotates and not m.stores_rotated_keys for m in mechanism.modules() if isinstance(m, Mechanism)):
        return ONE_LENGTH
    unread = arguments is not None and arguments.get("block_table") is not None  # a kernel reads the keys
    unknown = unread or not tells_paged_positions()
    return KEYS_UNKNOWN if unknown and asks_where_keys_stand(mechanism) else None


def refuse_continuous_batching(model: nn.Module, why: str | None) -> None:
    """Make `model` refuse continuous batching, for the reason `why`; None: leave it to the class of `model` again."""
    if why is None:
        vars(model).pop(START, None)
    elif hasattr(model, START):
        setattr(model, START, Refusal(type(model).__name__, why, REFUSED))
