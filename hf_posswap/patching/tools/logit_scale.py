"""Setting the logit scale of layers without positions in a swapped model."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_posswap.errors import NotPatchedError
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.schemes.layered import RNoPE
from hf_posswap.schemes.nope import NoPE, NoPEMechanism


def logit_scale_of(model: Any) -> float:
    """Return c of a model that was patched with `NoPE(logit_scale=...)` or `RNoPE(logit_scale=...)`.

    Raises:
        NotPatchedError: it carries no such swap.
    """
    scheme: Any = _plan(model).scheme
    return scheme.logit_scale


@alone(parameters=False)
def set_logit_scale(model: Any, logit_scale: float) -> None:
    """Set c of 1 + c ln s, which multiplies the attention scores of layers without positions, and update the record.

    Args:
        model: patched with `NoPE(logit_scale=...)` or `RNoPE(logit_scale=...)`, where 0 has no effect; or a PEFT
            model around one.
        logit_scale: c >= 0, see `fit_logit_scale`.

    Raises:
        NotPatchedError: the model carries no such swap.
        SchemeError: an impossible c.
        ModelInUseError: a forward of the model is running, or another thread changes it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import NoPE, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, NoPE(logit_scale=0.0))
        >>> set_logit_scale(model, 0.2)
        >>> logit_scale_of(model), model.config.posswap["scheme"]["logit_scale"]
        (0.2, 0.2)
    """
    target: Any = unwrap(model)
    plan = _plan(model)
    old: Any = plan.scheme
    scheme = dataclasses.replace(old, logit_scale=logit_scale)  # which checks it
    for module in target.get_submodule(plan.sites.stack(_main(plan)).entry).modules():
        if isinstance(module, NoPEMechanism) and module.scheme.logit_scale is not None:
            module.scheme = dataclasses.replace(module.scheme, logit_scale=scheme.logit_scale)
    target._posswap.plan = plan.with_schemes({**plan.schemes, _main(plan): scheme})
    target.config.posswap = target._posswap.plan.record.to_dict()


def _main(plan: SwapPlan) -> str:
    """Return the name of the stack whose scheme the plan gives as its own."""
    return list(plan.schemes)[-1]


def _plan(model: Any) -> SwapPlan:
    target: Any = unwrap(model)
    patch = getattr(target, "_posswap", None)
    scheme = None if patch is None else patch.plan.scheme
    if patch is None or not isinstance(scheme, NoPE | RNoPE) or scheme.logit_scale is None:
        carried = "no swap" if scheme is None else str(scheme)
        raise NotPatchedError(
            f"{type(target).__name__} carries {carried}: it has no logit scale. Patch it with NoPE(logit_scale=0.0) or "
            "RNoPE(logit_scale=0.0), which is nope or rnope with a scale that can be set."
        )
    return patch.plan
