"""The check that a swap stands as planned, and that nothing else changed: no forward is run."""

from __future__ import annotations

from typing import Any

from hf_posswap.compat.torch_tensors import version_of
from hf_posswap.errors import SwapVerificationError

Fingerprint = dict[str, tuple[int, int | None]]


def fingerprint(model: Any) -> Fingerprint:
    """Return the identity and version of every parameter: cheap, and exact for one process."""
    return {name: (id(p), version_of(p)) for name, p in model.named_parameters()}


def unread_record(model: Any) -> str:
    """Return what to say of a record in the config of a model that carries no swap: transformers read it, unchecked."""
    if getattr(model.config, "posswap", None) is None:
        return ""
    return " Its config records one, which nobody has held against its weights: hf_posswap.load does."


def check_structure(model: Any) -> None:
    """Check that every edit of the plan stands in the model: no forward is run.

    Raises:
        SwapVerificationError: something is not as planned.
    """
    plan = model._posswap.plan
    for edit in plan.edits:
        problem = edit.check(model)
        if problem:
            raise SwapVerificationError(f"{edit.path}: {problem}, so the swap to {plan.named} is not what it was.")
    if getattr(model.config, "posswap", None) is None:
        raise SwapVerificationError("config.posswap is gone: a checkpoint saved now would load as the native model.")


def check_untouched(model: Any, before: Fingerprint) -> None:
    """Check that no parameter but those that the plan's edits touch differs from its `fingerprint` before the swap.

    Raises:
        SwapVerificationError: names those that do.
    """
    after = fingerprint(model)
    touched = tuple(prefix for edit in model._posswap.plan.edits for prefix in edit.touches)
    names = before.keys() | after.keys()
    changed = sorted(n for n in names if before.get(n) != after.get(n) and not n.startswith(touched))
    if changed:
        raise SwapVerificationError(f"parameters outside the plan changed: {', '.join(changed)}.")
