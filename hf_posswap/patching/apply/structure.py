"""The check, without a forward, that a swap matches its plan and that nothing else changed."""

from __future__ import annotations

from typing import Any

from hf_posswap.compat.torch_tensors import version_of
from hf_posswap.errors import SwapVerificationError
from hf_posswap.families.modules import is_removed

Fingerprint = dict[str, tuple[int, int | None]]


def fingerprint(model: Any) -> Fingerprint:
    """Return the identity and version of every parameter: cheap, and exact for one process."""
    return {name: (id(p), version_of(p)) for name, p in model.named_parameters()}


def unread_record(model: Any) -> str:
    """Return a sentence about the record in the config of a model without a swap, which transformers read unchecked."""
    if getattr(model.config, "posswap", None) is None:
        return ""
    return " Its config records one that was not checked against its weights: hf_posswap.load checks it."


def check_structure(model: Any) -> None:
    """Check, without a forward, that every edit of the plan is applied to the model.

    Raises:
        SwapVerificationError: something is not as planned.
    """
    plan = model._posswap.plan
    for edit in plan.edits:
        problem = "its layer was removed since" if is_removed(model, edit.path) else edit.check(model)
        if problem:
            raise SwapVerificationError(f"{edit.path}: {problem}, so the swap to {plan.named} is no longer intact.")
    if getattr(model.config, "posswap", None) is None:
        raise SwapVerificationError("config.posswap is gone: a checkpoint saved now would load as the native model.")


def check_untouched(model: Any, before: Fingerprint) -> None:
    """Check that only the parameters that the plan's edits touch differ from their `fingerprint` before the swap.

    Raises:
        SwapVerificationError: others changed; the message names them.
    """
    after = fingerprint(model)
    touched = tuple(prefix for edit in model._posswap.plan.edits for prefix in edit.touches)
    names = before.keys() | after.keys()
    changed = sorted(n for n in names if before.get(n) != after.get(n) and not n.startswith(touched))
    if changed:
        raise SwapVerificationError(f"parameters outside the plan changed: {', '.join(changed)}.")
