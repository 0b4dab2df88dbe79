"""Choosing how a swapped model attends, also where transformers lets nobody choose for its class."""

from __future__ import annotations

from typing import Any

from hf_posswap import swap_plan
from hf_posswap.compat.transformers_attention import IMPLEMENTATION, can_choose_attention, supports_sdpa

EAGER_MASKS = ("mpt", "mvp")
"""Model types whose own code runs on the masks of eager attention alone."""


def attend(model: Any, implementation: str) -> bool:
    """Have a patched model attend by `implementation`, and return whether it can be had.

    Where the stock attention lacks the interface, transformers refuses to choose, with a warning: the config alone
    says, where the swap has given it the interface; elsewhere the model attends as it was built.
    """
    if can_choose_attention(model):
        if implementation == "sdpa" and not supports_sdpa(model):
            return False
        model.set_attn_implementation(implementation)
        return True
    plan = swap_plan(model)
    interface = any("AttentionInterface" in edit.after for edit in plan.edits)
    if not interface or plan.record.base_type in EAGER_MASKS:
        return False
    setattr(model.config, IMPLEMENTATION, implementation)
    return True
