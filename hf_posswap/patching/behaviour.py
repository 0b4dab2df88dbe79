"""What a swapped model does on a small input, beside what the plan says it must do."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_posswap.errors import SwapVerificationError
from hf_posswap.geometry import Geometry
from hf_posswap.patching.actions import ReplaceTable
from hf_posswap.patching.apply import unpatch_model
from hf_posswap.patching.rotary import matches_within
from hf_posswap.schemes.base import Mechanism, Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.layered import Layered
from hf_posswap.schemes.rope import RotaryScheme

_UNTRAINED = "the scheme's bias is the same for all keys until it is trained"


@dataclass(frozen=True)
class Probe:
    """The input of all checks.

    Attributes:
        ids: random tokens [1, Q].
        near: positions [1, Q] that count from the start.
        far: positions [1, Q] spread over the original length, so that slow angles show as well.
    """

    ids: Tensor
    near: Tensor
    far: Tensor


def behaviour(model: Any, tokens: int, seed: int) -> dict[str, str]:
    """Run a copy of a swapped `model` that shares its weights, and return what was found by each check.

    Raises:
        SwapVerificationError: a check failed.
    """
    twin = shadow(model).eval()
    plan, probe = twin._posswap.plan, _probe(twin, tokens, seed)
    out = {}
    with torch.no_grad():
        far = _logits(twin, probe.ids, probe.far)
        if not torch.isfinite(far).all():
            raise SwapVerificationError(f"the swapped model gives logits that are not finite, on {tokens} tokens.")
        out["finite"] = f"logits up to {float(far.abs().max()):.3g}"
        noise = 0.3 * torch.finfo(twin.dtype).eps ** 0.5 * float(far.abs().max()) + 1e-6
        shift = _shift(twin, plan, probe, noise)
        spread = _spread(twin, plan, probe, _gap(far, _logits(twin, probe.ids, probe.near)), noise)
        order = _order(twin, plan, probe, noise)
        expected = expectation(twin)  # before the swap is taken back
        native = None if expected is None else _logits(unpatch_model(twin), probe.ids, probe.far)
        out["unswapped model"] = _difference(plan, expected, far, native, noise)
    return out | {"shifted positions": shift, "spread positions": spread, "order of tokens": order}


def shadow(model: Any) -> Any:
    """Return a copy of `model` that shares its parameters and buffers: only its structure is copied."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def expectation(model: Any) -> Literal["same", "different"] | None:
    """Return how the logits must compare with the unswapped model's; None: it cannot be had back."""
    patch = model._posswap
    plan, old = patch.plan, {getattr(step, "path", ""): step for step in patch.undo}
    if not patch.undo:
        return None
    if isinstance(plan.scheme, Blend) and plan.scheme.weight == 0:
        return "same"
    if isinstance(plan.edits[0].action, ReplaceTable) and not plan.scheme.acts_inside:
        table = plan.edits[0].action
        before, now = old[table.path].weight, model.get_submodule(table.path).weight
        rows = min(len(before), len(now))
        return "same" if torch.equal(before[:rows].to(now), now[:rows]) else "different"
    if not plan.sites.rotary:
        return "different"
    natives, geometry = [old[path].module for path in plan.sites.rotary], plan.sites.geometry
    if isinstance(plan.scheme, Layered):
        schemes = {plan.scheme.of_layer(layer) for layer in range(geometry.num_layers)}
    else:
        schemes = {plan.scheme.new if isinstance(plan.scheme, Blend) else plan.scheme}
    same = all(_same_angles(native, scheme, geometry) for native in natives for scheme in schemes)
    return "same" if same else "different"


def _same_angles(native: nn.Module, scheme: Scheme, geometry: Geometry) -> bool:
    """Return whether `native` rotates as `scheme` does within the original length."""
    if not isinstance(scheme, RotaryScheme):
        return False
    plain = scheme.native_rope(geometry) is not None and scheme.layout == (geometry.layout or scheme.layout)
    return plain and matches_within(native, scheme, geometry)


def _difference(plan: Any, expected: str | None, here: Tensor, native: Tensor | None, noise: float) -> str:
    if native is None:
        return "not compared: the model was loaded swapped"
    gap = _gap(here, native)
    if expected == "same" and gap > noise:
        raise SwapVerificationError(
            f"{plan.scheme} is the mechanism that the model had, but its logits moved by {gap:.3g}."
        )
    if expected == "different" and gap == 0:
        raise SwapVerificationError(f"{plan.scheme}: the logits are those of the unswapped model: nothing took effect.")
    return f"its logits are {gap:.3g} away" + (", as they should be: an identity" if expected == "same" else "")


def _shift(model: Any, plan: Any, probe: Probe, noise: float) -> str:
    """Shift all positions together: nothing may change under a relative scheme, and something must under a table."""
    room = plan.sites.geometry.original_length - probe.ids.shape[1]
    if room < 1:
        return "not run: the original length leaves no room"
    by = min(room, 64)
    gap = _gap(_logits(model, probe.ids, probe.near + by), _logits(model, probe.ids, probe.near))
    if plan.scheme.traits.relative and gap > 10 * noise:
        raise SwapVerificationError(f"{plan.scheme}: shifting all positions by {by} moves the logits by {gap:.3g}.")
    if plan.scheme.table_part is not None and gap == 0:
        raise SwapVerificationError(f"{plan.scheme}: the logits do not depend on the position ids.")
    return f"by {by}, the logits move by {gap:.3g}"


def _spread(model: Any, plan: Any, probe: Probe, gap: float, noise: float) -> str:
    """Spread the positions: every mechanism must notice, but for one that knows none, or none yet."""
    if torch.equal(probe.near, probe.far):
        return "not run: the original length leaves no room"
    blind = _blind(plan.scheme)
    if blind is not None and not blind.acts_inside and gap > noise:
        raise SwapVerificationError(f"{plan.scheme}: spreading the positions moves the logits by {gap:.3g}.")
    found = f"the logits move by {gap:.3g}"
    if gap > noise or blind is not None:
        return found
    if _is_even(model, probe):
        return f"{found}: {_UNTRAINED}"
    raise SwapVerificationError(f"{plan.scheme}: the logits do not depend on the position ids ({gap:.3g}).")


def _order(model: Any, plan: Any, probe: Probe, noise: float) -> str:
    """Reverse the past of the last token: it must notice, unless the scheme knows no positions."""
    reversed_past = probe.ids.flip(1)
    reversed_past[:, :-1] = probe.ids[:, :-1].flip(1)
    reversed_past[:, -1] = probe.ids[:, -1]
    here, there = (_logits(model, ids, probe.near)[:, -1] for ids in (probe.ids, reversed_past))
    gap = _gap(here, there)
    found = f"reversing the past moves the last logits by {gap:.3g}"
    if gap > noise or _blind(plan.scheme) is not None:
        return found
    if _is_even(model, probe):
        return f"{found}: {_UNTRAINED}"
    raise SwapVerificationError(f"{plan.scheme}: the logits do not depend on the order of the tokens ({gap:.3g}).")


def _blind(scheme: Scheme) -> Scheme | None:
    """Return the scheme in force if it knows no positions, or None."""
    if isinstance(scheme, Blend) and scheme.weight == 1:
        scheme = scheme.new
    return scheme if scheme.kind == "none" else None


def _is_even(model: Any, probe: Probe) -> bool:
    """Return whether `model` has a bias on its scores that, as it stands, tells no key from another."""
    biases = [m.bias(probe.far, probe.far) for m in model.modules() if isinstance(m, Mechanism) and m.biases]
    return bool(biases) and all(torch.equal(bias, bias[..., :1].expand_as(bias)) for bias in biases)


def _probe(model: Any, tokens: int, seed: int) -> Probe:
    generator = torch.Generator().manual_seed(seed)
    sites, words = model._posswap.plan.sites, model.config.vocab_size
    tokens = min(tokens, sites.geometry.original_length)
    low = min(5, words - 2)  # leave special tokens (padding above all) out of the input
    ids = torch.randint(low, words, (1, tokens), generator=generator).to(model.device)
    near = torch.arange(tokens, device=model.device)[None]
    far = near * max(1, (sites.geometry.original_length - 1) // max(1, tokens - 1))
    return Probe(ids, near + sites.first_position, far + sites.first_position)


def _logits(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions)
    return (out.logits if "logits" in out else out[0]).float()


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
