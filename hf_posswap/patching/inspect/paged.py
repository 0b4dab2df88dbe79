"""Whether an inference engine with a paged cache supports a swap that acts inside attention, and by whose attention.

Such an engine receives queries, keys and values of the new tokens of many texts, and computes attention itself. What is
done to q and k at their own positions works there, whatever else is in the batch. A bias works if the engine supports
it, as ALiBi's slopes. A scheme that changes the scores otherwise needs its own attention over the cached keys of each
text. No scheme works whose tokens depend on what follows them: texts come in parts, and share the cache of a prefix.
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
    """Return why a program with a paged cache cannot serve the swap of `plan`, as the end of a sentence; None: it can.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import plan_swap
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> paged_problem(plan_swap(model, "kerple")) is None
        True
        >>> paged_problem(plan_swap(model, "dynamic", factor=4.0)).split(", which")[0]
        'the angles of dynamic follow the length of the whole text'
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
    """Return m_h, [H], of a bias -m_h |i - j| that `mechanism` adds to the scores; None: none, or they are learned."""
    return mechanism.slopes if mechanism.biases and not mechanism.learns_slopes else None


def needs_own_attention(mechanism: Mechanism) -> bool:
    """Return whether an engine's own kernels cannot compute attention with `mechanism`: several rotations, or a bias.

    Slopes that are learned are among a checkpoint's weights, and an engine takes slopes before it reads those.

    Example:
        >>> from hf_posswap.schemes.alibi import AlibiMechanism
        >>> needs_own_attention(AlibiMechanism([0.25, 0.0625], interpolation=1.0))
        False
        >>> needs_own_attention(AlibiMechanism([0.25, 0.0625], interpolation=1.0, learned=True))
        True
    """
    return mechanism.splits or (mechanism.biases and slopes_of(mechanism) is None)


def plan_needs_own_attention(plan: SwapPlan) -> bool:
    """Return whether a layer of the swap of `plan` needs attention other than an engine's own kernels."""
    return any(needs_own_attention(mechanism) for _, _, mechanism in mechanisms_of(plan))


def _problem(scheme: str, mechanism: Mechanism) -> str | None:
    """Return why a paged cache cannot serve `mechanism`, of the scheme called `scheme`, or None."""
    if mechanism.rotates and not mechanism.stores_rotated_keys:
        return (
            f"the angles of {scheme} follow the length of the whole text, which is not known of a text that comes in "
            "parts or shares the cache of a prefix; follow='query' takes the length at each token, and yarn, ntk and "
            "longrope with pin=LENGTH have fixed angles"
        )
    return None
