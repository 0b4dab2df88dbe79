"""Proof that a swap took effect, and that nothing else changed: its structure, and its behaviour on a small input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posswap.compat.accelerate_state import take_out_of_autocast
from hf_posswap.compat.torch_modules import copy_module, unchanged
from hf_posswap.errors import NotPatchedError, SwapVerificationError
from hf_posswap.patching.apply.applied import applied_swap, check_structure, unread_record
from hf_posswap.patching.apply.patch_model import unpatch_model
from hf_posswap.patching.edits.restore import weight_maps
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.verify.patch_probe import patch_probe
from hf_posswap.patching.verify.probe import Expected, NoEffectSeen, Noise, Probe, finer, gap, jitter_of, noise_of
from hf_posswap.patching.verify.token_probe import token_probe
from hf_posswap.utils import html_tables
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
class Verification(ResultView):
    """What `verify_swap` found.

    Attributes:
        checks: each check by name: what was found.
    """

    checks: dict[str, str]

    def _repr_facts(self) -> dict[str, object]:
        return {"passed": list(self.checks)} if len(self.checks) < 5 else {"passed": len(self.checks)}

    def __str__(self) -> str:
        return in_lines(f"ok  {name}: {result}" for name, result in self.checks.items())

    def _repr_html_(self) -> str:
        return html_tables.together(
            [html_tables.table((f"ok  {name}", result) for name, result in self.checks.items())]
        )


def verify_swap(model: PreTrainedModel, *, tokens: int = 12, seed: int = 0) -> Verification:
    """Prove that the swap of `model` is in force: its structure, and its behaviour on a small random input.

    Checks that every edit of the plan stands, with the planned frequencies, slopes and frozen tables; that the logits
    differ from the unswapped model's, or are the same where the swap is an identity; that shifting all positions leaves
    a relative scheme's logits alone and moves a table's; that spreading them, or reversing the tokens, matters. Runs on
    a copy that shares the weights, so `model` itself is not touched. A model that sees images is given one of noise,
    whose patches are shuffled instead, and one of another size.

    Args:
        model: a patched model (or a PEFT model around one), off meta.
        tokens: length of the input, at least 2.
        seed: of the input.

    Raises:
        NotPatchedError: the model carries no swap.
        SwapVerificationError: a check failed: which, and by how much.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "alibi")
        >>> list(verify_swap(model).checks)
        ['edits', 'finite', 'unswapped model', 'shifted positions', 'spread positions', 'order of tokens']
    """
    target = unwrap(model)
    if getattr(target, "_posswap", None) is None:
        raise NotPatchedError(f"{type(target).__name__} carries no swap: nothing to verify.{unread_record(target)}")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise SwapVerificationError(f"tokens must be a whole number >= 2, got {tokens!r}.")
    check_structure(target)
    checks = {"edits": f"{len(applied_swap(target).plan.edits)} stand as planned"}
    with unchanged(target):  # a copy shares buffers, and longrope writes its angles into one
        return Verification(checks | behaviour(target, tokens, seed))


def behaviour(model: PreTrainedModel, tokens: int, seed: int) -> dict[str, str]:
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


def make_probe(model: PreTrainedModel, tokens: int, seed: int) -> Probe:
    """Return an input for a swapped `model`, of the kind that it takes."""
    images = applied_swap(model).plan.sites.main.inputs == "images"
    return patch_probe(model, seed) if images else token_probe(model, tokens, seed)


def _checked(twin: PreTrainedModel, tokens: int, seed: int, precision: torch.dtype) -> dict[str, str]:
    """Return what was found by each check on `twin`, a copy of a model of `precision` that is free to be changed."""
    swap, probe = applied_swap(twin), make_probe(twin, tokens, seed)
    swap.fitted = False  # the copy may be taken apart whatever its weights are
    out = probe.run(twin)
    if not torch.isfinite(out).all():
        raise SwapVerificationError(f"the swapped model gives {probe.outputs} that are not finite.")
    largest = float(out.abs().max())
    noise = noise_of(twin, largest, probe.again(twin), precision)
    noise = replace(noise, jitter=partial(jitter_of, twin, probe))
    moved = probe.moved(twin, noise)
    expected = probe.expected(twin) if swap.can_undo else None  # before the swap is taken back
    here = probe.comparable(twin)
    native = None if expected is None else probe.comparable(unpatch_model(twin))
    unswapped = _difference(swap.plan.named, probe, expected, here, native, noise)
    return {"finite": f"{probe.outputs} up to {largest:.3g}", "unswapped model": unswapped, **moved}


def copy_sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` that shares its parameters and buffers: only its structure is copied.

    A forward that another library put on a module, as TRL does, runs the copy; accelerate's autocast is left out.
    """
    tensors = [tensor for module in model.modules() for tensor in vars(module).values() if isinstance(tensor, Tensor)]
    derived = [tensor for tensor in tensors if not tensor.is_leaf]  # as the biases of HQQ, which no copy takes
    states = [vars(module).get("state") for module in model.modules()]
    packed = [state for state in states if hasattr(state, "CB")]  # bitsandbytes moves 8-bit weights there as they run
    memo: dict[int, object] = {id(each): each for each in (*model.parameters(), *model.buffers(), *derived, *packed)}
    copied = copy_module(model, memo | weight_maps(model))
    for module in copied.modules():
        take_out_of_autocast(module)
    return copied


def _difference(
    named: str, probe: Probe, expected: Expected | None, here: Tensor, native: Tensor | None, noise: Noise
) -> str:
    if native is None:
        return "not compared: the model was loaded swapped"
    moved, outputs = gap(here, native), probe.outputs
    if expected == "same" and not noise.explains(moved):
        raise SwapVerificationError(
            f"{named} is the mechanism that the model had, but its {outputs} moved by {moved:.3g}."
        )
    if expected == "different" and moved == 0:
        raise NoEffectSeen(f"{named}: the {outputs} are those of the unswapped model: nothing took effect.")
    if expected == "same":
        return f"its {outputs} are {moved:.3g} away, as they should be: an identity"
    of = f"standard deviation {float(native.std()):.3g}" if native.numel() > 1 else f"size {float(native.abs()):.3g}"
    return f"its {outputs}, of {of}, are up to {moved:.3g} away"
