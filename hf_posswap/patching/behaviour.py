"""What a swapped model does on a small input, beside what the plan says it must do."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_posswap.errors import SwapVerificationError
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.rotary_inside import MOVED_BY_SHIFT
from hf_posswap.families.sites import Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply import unpatch_model
from hf_posswap.patching.interface import CopyRows
from hf_posswap.patching.noise import NoEffectSeen, Noise, finer, noise_of
from hf_posswap.patching.offloaded import stored, weight_maps
from hf_posswap.patching.own_attention import native_scheme
from hf_posswap.patching.plan import SwapPlan
from hf_posswap.patching.probe import Probe, make_probe
from hf_posswap.patching.rotary import matches_within
from hf_posswap.patching.table_actions import ReplaceTable
from hf_posswap.schemes.base import Mechanism, Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.layered import Layered
from hf_posswap.schemes.rope import RotaryScheme

_UNTRAINED = "the scheme's bias is the same for all keys until it is trained"


def behaviour(model: Any, tokens: int, seed: int) -> dict[str, str]:
    """Run a copy of a swapped `model` that shares its weights, and return what was found by each check.

    Raises:
        SwapVerificationError: a check failed.
    """
    with torch.no_grad():
        try:
            return _checked(shadow(model).eval(), tokens, seed, model.dtype)
        except NoEffectSeen as error:
            copied, seen = finer(model), error
        if copied is None:
            raise SwapVerificationError(str(seen))
        try:
            found = _checked(copied, tokens, seed, model.dtype)
        except NoEffectSeen as error:
            raise SwapVerificationError(str(error)) from None
    return found | {"finite": f"{found['finite']}, in float64: {model.dtype} hides so weak a mechanism"}


def _checked(twin: Any, tokens: int, seed: int, precision: torch.dtype) -> dict[str, str]:
    """Return what was found by each check on `twin`, a copy of a model of `precision` that is free to be changed."""
    plan, probe = twin._posswap.plan, make_probe(twin, tokens, seed)
    far, near = probe.run(twin, probe.far), probe.run(twin, probe.near)
    if not torch.isfinite(far).all():
        raise SwapVerificationError(f"the swapped model gives logits that are not finite, on {tokens} tokens.")
    out = {"finite": f"logits up to {float(far.abs().max()):.3g}"}
    again = _gap(near, probe.run(twin, probe.near))
    noise = noise_of(twin, float(far.abs().max()), again, precision)
    shift = _shift(twin, plan, probe, noise)
    spread = _spread(twin, plan, probe, _gap(far, near), noise)
    order = _order(twin, plan, probe, noise)
    expected = expectation(twin)  # before the swap is taken back
    where = probe.near if probe.handed_on else probe.far  # the unswapped model would drop them
    here = probe.run(twin, where)
    native = None if expected is None else probe.run(unpatch_model(twin), where)
    out["unswapped model"] = _difference(plan, expected, here, native, noise)
    return out | {"shifted positions": shift, "spread positions": spread, "order of tokens": order}


def shadow(model: Any) -> Any:
    """Return a copy of `model` that shares its parameters and buffers: only its structure is copied."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors | weight_maps(model))


def expectation(model: Any) -> Literal["same", "different"] | None:
    """Return how the logits must compare with the unswapped model's; None: it cannot be had back."""
    patch = model._posswap
    plan, old = patch.plan, {getattr(step, "path", ""): step for step in patch.undo}
    if not patch.undo:
        return None
    stacks = [plan.sites.stack(name) for name in plan.schemes]
    return "same" if all(_is_kept(model, plan, stack, old) for stack in stacks) else "different"


def _is_kept(model: Any, plan: SwapPlan, stack: Stack, old: dict[str, Any]) -> bool:
    """Return whether the scheme of `stack` is, within the original length, the mechanism that it had before."""
    scheme, geometry = plan.schemes[stack.name], stack.geometry
    if plan.record.relative == "drop":
        return False
    if isinstance(scheme, Blend) and scheme.weight == 0:
        return True
    first = next(edit.action for edit in plan.edits if edit.stack == stack.name)
    if isinstance(first, ReplaceTable) and not scheme.acts_inside:
        before, now = old[first.path].weight, stored(model.get_submodule(first.path), "weight")
        rows = min(len(before), len(now))
        return torch.equal(before[:rows].to(now), now[:rows])
    if stack.inside is not None:
        learned = stack.inside["name"] == "t5"
        held = not learned or any(isinstance(e.action, CopyRows) for e in plan.edits if e.stack == stack.name)
        return held and stack.table is None and _same_inside(scheme, native_scheme(stack.inside, geometry), geometry)
    if not stack.rotary:
        return False
    natives = [old[path].module for path in stack.rotary]
    if isinstance(scheme, Layered):
        schemes = {scheme.of_layer(layer) for layer in range(geometry.num_layers)}
    else:
        schemes = {scheme.new if isinstance(scheme, Blend) else scheme}
    return all(_same_angles(native, one, stack) for native in natives for one in schemes)


def _same_angles(native: nn.Module, scheme: Scheme, stack: Stack) -> bool:
    """Return whether `native` rotates as `scheme` does within the original length."""
    if not isinstance(scheme, RotaryScheme):
        return False
    geometry = stack.geometry
    plain = scheme.native_rope(geometry) is not None and scheme.layout == (geometry.layout or scheme.layout)
    return plain and all(matches_within(native, scheme, geometry, name) for name in stack.turning)


def _same_inside(scheme: Scheme, native: Scheme, geometry: Geometry) -> bool:
    """Return whether `scheme` does within the original length what `native`, which was inside attention, does."""
    if scheme == native or not (isinstance(scheme, RotaryScheme) and isinstance(native, RotaryScheme)):
        return scheme == native
    ours, theirs = scheme.angles(geometry), native.angles(geometry)
    alike = scheme.layout == native.layout and ours.inv_freq.shape == theirs.inv_freq.shape
    plain = scheme.native_rope(geometry) is not None and ours.attention_factor == theirs.attention_factor
    return alike and plain and torch.allclose(ours.inv_freq, theirs.inv_freq, rtol=1e-5, atol=0)


def _difference(plan: Any, expected: str | None, here: Tensor, native: Tensor | None, noise: Noise) -> str:
    if native is None:
        return "not compared: the model was loaded swapped"
    gap = _gap(here, native)
    if expected == "same" and gap > noise.most:
        raise SwapVerificationError(
            f"{plan.named} is the mechanism that the model had, but its logits moved by {gap:.3g}."
        )
    if expected == "different" and gap == 0:
        raise NoEffectSeen(f"{plan.named}: the logits are those of the unswapped model: nothing took effect.")
    return f"its logits are {gap:.3g} away" + (", as they should be: an identity" if expected == "same" else "")


def _shift(model: Any, plan: SwapPlan, probe: Probe, noise: Noise) -> str:
    """Shift all positions together: nothing may change under relative schemes, and something must under a table."""
    room = min(stack.geometry.original_length for stack in plan.sites.stacks) - probe.ids.shape[1]
    if room < 1:
        return "not run: the original length leaves no room"
    by, schemes = min(room, 64), plan.schemes.values()
    gap = _gap(probe.shifted(model, by), probe.run(model, probe.near))
    # what keeps its table moves with it, unless the positions are given to the other stack alone
    whole = len(plan.schemes) == len(plan.sites.stacks) or probe.position_argument is not None
    types = [config_at(model.config, stack.config).model_type for stack in plan.sites.stacks]
    why = next((MOVED_BY_SHIFT[name] for name in types if name in MOVED_BY_SHIFT), None)
    if why is not None:
        return f"by {by}, the logits move by {gap:.3g}, as they did: {why}"
    if whole and all(scheme.traits.relative for scheme in schemes) and gap > 10 * noise.most:
        raise SwapVerificationError(f"{plan.named}: shifting all positions by {by} moves the logits by {gap:.3g}.")
    if any(scheme.table_part is not None for scheme in schemes) and gap == 0:
        raise NoEffectSeen(f"{plan.named}: the logits do not depend on the position ids.")
    return f"by {by}, the logits move by {gap:.3g}"


def _spread(model: Any, plan: SwapPlan, probe: Probe, gap: float, noise: Noise) -> str:
    """Spread the positions: every mechanism must notice, but for one that knows none, or none yet."""
    if probe.position_argument is None:
        return "not run: the model takes no position ids"
    if torch.equal(probe.near, probe.far):
        return "not run: the original length leaves no room"
    blind = _blind(plan.scheme)
    if blind is not None and not blind.acts_inside and gap > noise.most:
        raise SwapVerificationError(f"{plan.scheme}: spreading the positions moves the logits by {gap:.3g}.")
    found = f"the logits move by {gap:.3g}"
    if gap > noise.least or blind is not None:
        return found
    if _is_even(model, probe):
        return f"{found}: {_UNTRAINED}"
    raise NoEffectSeen(f"{plan.scheme}: the logits do not depend on the position ids ({gap:.3g}).")


def _order(model: Any, plan: SwapPlan, probe: Probe, noise: Noise) -> str:
    """Reverse the past of the last token, in each stack: it must notice, unless the scheme knows no positions."""
    here, found = probe.run(model, probe.near)[:, -1], []
    for name, scheme in plan.schemes.items():
        way = "encoder_ids" if name == "encoder" and model.config.is_encoder_decoder else "ids"
        gap = _gap(here, probe.run(model, probe.near, **{way: probe.reordered()})[:, -1])
        said = f"{name}: " if name and len(plan.schemes) > 1 else ""
        found.append(f"{said}reversing the past moves the last logits by {gap:.3g}")
        if gap > noise.least or _blind(scheme) is not None:
            continue
        if not _is_even(model, probe):
            raise NoEffectSeen(f"{scheme}: the logits do not depend on the order of the tokens ({gap:.3g}).")
        found[-1] += f": {_UNTRAINED}"
    return "; ".join(found)


def _blind(scheme: Scheme) -> Scheme | None:
    """Return the scheme in force if it knows no positions, or None."""
    if isinstance(scheme, Blend) and scheme.weight == 1:
        scheme = scheme.new
    return scheme if scheme.kind == "none" else None


def _is_even(model: Any, probe: Probe) -> bool:
    """Return whether `model` has a bias on its scores that, as it stands, tells no key from another."""
    biases = [m.bias(probe.far, probe.far) for m in model.modules() if isinstance(m, Mechanism) and m.biases]
    return bool(biases) and all(torch.equal(bias, bias[..., :1].expand_as(bias)) for bias in biases)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
