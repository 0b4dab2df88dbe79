"""Run a swapped model on a small input, and check it against the plan."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.accelerate_hooks import take_out_of_autocast
from hf_posswap.compat.python_functions import rebound
from hf_posswap.errors import SwapVerificationError
from hf_posswap.patching.apply.patch_model import unpatch_model
from hf_posswap.patching.edits.restore import weight_maps
from hf_posswap.patching.verify.noise import NoEffectSeen, Noise, finer, noise_of
from hf_posswap.patching.verify.patch_probe import patch_probe
from hf_posswap.patching.verify.probe import Expected, Probe, gap
from hf_posswap.patching.verify.token_probe import token_probe


def behaviour(model: Any, tokens: int, seed: int) -> dict[str, str]:
    """Run a copy of a swapped `model` that shares its weights, and return the result of each check.

    Raises:
        SwapVerificationError: a check failed.
    """
    with torch.no_grad():
        try:
            return _checked(copy_sharing_weights(model).eval(), tokens, seed, model.dtype)
        except NoEffectSeen as error:
            copied, seen = finer(model), error
        if copied is None:
            raise SwapVerificationError(str(seen))
        try:
            checks = _checked(copied, tokens, seed, model.dtype)
        except NoEffectSeen as error:
            raise SwapVerificationError(str(error)) from None
    return checks | {"finite": f"{checks['finite']}, in float64: {model.dtype} hides so weak a mechanism"}


def make_probe(model: Any, tokens: int, seed: int) -> Probe:
    """Return an input for a swapped `model`, of the kind that it takes."""
    images = model._posswap.plan.sites.main.inputs == "images"
    return patch_probe(model, seed) if images else token_probe(model, tokens, seed)


def _checked(twin: Any, tokens: int, seed: int, precision: torch.dtype) -> dict[str, str]:
    """Return what was found by each check on `twin`, a copy of a model of `precision` that is free to be changed."""
    swap, probe = twin._posswap, make_probe(twin, tokens, seed)
    swap.fitted = False  # the copy may be taken apart whatever its weights are
    out = probe.run(twin)
    if not torch.isfinite(out).all():
        raise SwapVerificationError(f"the swapped model gives {probe.outputs} that are not finite.")
    largest = float(out.abs().max())
    noise = noise_of(twin, largest, probe.again(twin), precision)
    moved = probe.moved(twin, noise)
    expected = probe.expected(twin) if swap.can_undo else None  # before the swap is taken back
    here = probe.comparable(twin)
    native = None if expected is None else probe.comparable(unpatch_model(twin))
    unswapped = _difference(swap.plan.named, probe, expected, here, native, noise)
    return {"finite": f"{probe.outputs} up to {largest:.3g}", "unswapped model": unswapped, **moved}


def copy_sharing_weights(model: Any) -> Any:
    """Return a copy of `model` that shares its parameters and buffers: only its structure is copied.

    A forward that another library put on a module, as TRL does, runs the copy; accelerate's autocast is left out.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, memo := memo | weight_maps(model))
    for module in copied.modules():
        take_out_of_autocast(module)
        if (forward := vars(module).get("forward")) is not None:
            vars(module)["forward"] = rebound(forward, memo)
    return copied


def _difference(
    named: str, probe: Probe, expected: Expected | None, here: Tensor, native: Tensor | None, noise: Noise
) -> str:
    if native is None:
        return "not compared: the model was loaded swapped"
    moved, outputs = gap(here, native), probe.outputs
    if expected == "same" and moved > noise.most:
        raise SwapVerificationError(
            f"{named} is the mechanism that the model had, but its {outputs} moved by {moved:.3g}."
        )
    if expected == "different" and moved == 0:
        raise NoEffectSeen(f"{named}: the {outputs} are those of the unswapped model: nothing took effect.")
    if expected == "same":
        return f"its {outputs} are {moved:.3g} away, as they should be: an identity"
    return f"its {outputs}, of standard deviation {float(native.std()):.3g}, are up to {moved:.3g} away"
