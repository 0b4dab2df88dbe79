"""Whether an inference engine with its own kernels over a paged cache supports a swap that acts inside attention.

Such an engine receives queries, keys and values of the new tokens of many texts, and computes attention itself. What is
done to q and k at their own positions works there, whatever else is in the batch. A bias works if the engine supports
it, as ALiBi's slopes. A scheme that needs the positions of cached keys, or the scores, does not work.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.sites.attention.edits import AddMechanism, PatchAttention
from hf_posswap.patching.sites.attention.native import AttendThroughInterface
from hf_posswap.patching.sites.rotary.edits import KeepRotary
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.mechanism import Mechanism


def paged_problem(plan: SwapPlan) -> str | None:
    """Return why a paged cache cannot serve the swap of `plan`, as the end of a sentence; None: it can.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import plan_swap
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> paged_problem(plan_swap(model, "rope")), paged_problem(plan_swap(model, "kerple"))
        (None, 'kerple adds a bias to the scores that is not linear in the distance (ALiBi)')
    """
    sites = plan.sites
    if len(sites.stacks) > 1 or sites.main.inputs != "text" or not sites.geometry.causal:
        return f"{plan.model} is not a text-only decoder"
    if any(isinstance(edit, AttendThroughInterface) for edit in plan.edits):
        return f"the attention of {plan.model} does not use transformers' attention interface"
    if any(isinstance(scheme, Blend) for scheme in plan.schemes.values()):
        return "its swap is unfinished (a blend): end it with hf_posswap.finish_blend, and save again"
    if any(isinstance(edit, KeepRotary) and edit.follows_length for edit in plan.edits):
        return f"the rotation that {plan.model} keeps follows the length, and one batch has texts of many lengths"
    problems = (_problem(scheme, mechanism) for _, scheme, mechanism in mechanisms_of(plan))
    return next((problem for problem in problems if problem is not None), None)


def mechanisms_of(plan: SwapPlan) -> Iterator[tuple[str, str, Mechanism]]:
    """Yield the path of each attention module that `plan` patches, the name of its scheme, and its mechanism.

    No model is needed: the mechanisms are new ones.
    """
    for add in (edit for edit in plan.edits if isinstance(edit, AddMechanism)):
        mechanism = add.scheme.mechanism(add.geometry)
        for edit in plan.edits:
            if isinstance(edit, PatchAttention) and edit.carried == add.path:
                yield edit.path, add.scheme.name, mechanism.for_layer(edit.layer)


def slopes_of(mechanism: Mechanism) -> Tensor | None:
    """Return m_h, [H], of a bias -m_h |i - j| that `mechanism` adds to the scores; None: it adds none."""
    return mechanism.slopes if mechanism.biases else None


def _problem(scheme: str, mechanism: Mechanism) -> str | None:
    """Return why a paged cache cannot serve `mechanism`, of the scheme called `scheme`, or None."""
    if mechanism.splits:
        return f"{scheme} computes the scores itself, with several rotations of each key"
    if mechanism.biases and mechanism.slopes is None:
        return f"{scheme} adds a bias to the scores that is not linear in the distance (ALiBi)"
    if mechanism.rotates and not mechanism.stores_rotated_keys:
        return (
            f"{scheme} re-rotates keys as the text grows, and a cache of rotated keys cannot follow; yarn, ntk and "
            "longrope with pin=LENGTH have fixed angles"
        )
    return None
