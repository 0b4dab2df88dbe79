"""The record of a natively expressed swap, held against the checkpoint that it lies in, before it is believed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_posswap.patching.inspect.recorded import config_problems, recorded_plan, refuse_lie
from hf_posswap.patching.plan.swap_plan import SwapPlan


def checked_plan(model: Any) -> SwapPlan:
    """Return the plan of the swap that a stock `model`, read from a native checkpoint, records in its config.

    What the record says must be what config and weights say: the route, the type, the lengths, the frequencies that
    the rope parameters make, settings of modules, zeros where a table was taken away, the formula's rows where a table
    is frozen. What it says of the model before the swap goes into the plan and nowhere else.

    Args:
        model: as `from_pretrained` of its stock class returns it; it is not changed.

    Raises:
        RecordError: it says something else, or nothing that can be carried out: what differs, by name.
    """
    skeleton, plan = recorded_plan(model.config, type(model))
    refuse_lie(plan, [*config_problems(model, skeleton, plan), *_weight_problems(model, plan)])
    return plan


def _weight_problems(model: Any, plan: SwapPlan) -> Iterator[str]:
    """Give which weights are not those that the native `plan` leaves behind; those on meta cannot be read."""
    for edit in plan.edits:
        problem = edit.check_loaded(model)
        if problem is not None:
            yield f"{edit.path} {problem}"
