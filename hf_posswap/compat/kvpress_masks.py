"""Keys that kvpress hides from single heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_NAME = "masked_key_indices"


def has_masked_keys(module: nn.Module, queries: int, keys: int) -> bool:
    """Return whether kvpress hides keys from single heads of the attention `module` in this call.

    Touches `masked_key_indices`, where kvpress's AdaKVPress and presses like it (0.5) note which keys are hidden, and
    clears it in a prefill, as they do. The function that hides them is wrapped around those that transformers has
    registered. Without it an attention that is not one of these would leave the press out silently, and the keys of an
    earlier text would be hidden from the next.

    Args:
        module: of attention.
        queries: that attend in this call.
        keys: that they attend to.
    """
    if module.__dict__.get(_NAME) is None:
        return False
    if queries == keys:
        setattr(module, _NAME, None)
        return False
    return True
