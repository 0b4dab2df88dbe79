"""The part of a position table that says nothing of position: its mean, moved to where a swap leaves it alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.errors import AlreadyPatchedError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.sites import Stack, TokenTable
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.plan.preconditions import refuse_wrapped_parts

CENTRED = "_posswap_centred"
"""Attribute of a model whose token embeddings hold the mean of its table; its checkpoint's may not."""
_PROBED = 16
"""Most tokens of each of the two sequences on which it is proved that the outputs stay."""
_ALLOWED = 1e-3
"""Most by which an output may move, as a share of the largest output: float32 rounds."""


@alone(parameters=False)
@torch.no_grad()
def centre_table(model: Any) -> Tensor:
    """Move the mean row of the position table of `model` into its token embeddings, and return that row [E].

    For all rows p and all tokens t: p' = p - mean, t' = t + mean, so the sum of both, which is all that the model sees,
    stays. Where the head is tied to the token embeddings, every logit moves by the same number and the probabilities
    stay. A swap that takes the table away afterwards takes positions alone, and not also a vector that the first layer
    has always seen: the swapped model starts nearer to what it was, and adapts in fewer tokens. Call it before
    `patch_model`. It is proved on a small input, and taken back where the outputs moved.

    What it changes are weights. An adapter on the swapped model is not saved from then on: the base that it names has
    others. Save the model and load it again before an adapter is put on it.

    Args:
        model: of one stack that reads tokens, with a position table, in float32 or float64, not swapped.

    Raises:
        UnsupportedSwapError: another kind of model, weights of another dtype, or outputs that would not stay.
        UnsupportedModelError: no family describes the model.
        AlreadyPatchedError: it carries a swap.
        ModelInUseError: a forward of the model is running, or another thread changes it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model, swap_plan
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> centre_table(model).shape, bool(model.transformer.wpe.weight.mean(dim=0).abs().max() < 1e-6)
        (torch.Size([8]), True)
        >>> swap_plan(patch_model(model, "rope", max_length=64)).route
        'plugin'
    """
    model = unwrap(model)
    stack, table, words = _checked_parts(model)
    mean = table[stack.table_offset :].mean(dim=0)
    kept = table.clone(), words.clone()
    before = _outputs(model, stack)
    table -= mean
    words += mean / _scale(model)
    moved = float((_outputs(model, stack) - before).abs().max() / before.abs().max())
    if not moved <= _ALLOWED:
        table.copy_(kept[0]), words.copy_(kept[1])
        raise UnsupportedSwapError(
            f"centre_table: the outputs of {type(model).__name__} would move by {moved:.1e} of the largest, more than "
            f"rounding does: its table and its token embeddings are not simply added. The model is as it was."
        )
    setattr(model, CENTRED, True)
    return mean


def check_centring(model: Any) -> None:
    """Refuse a `model` whose table `centre_table` could not centre; its errors, but for outputs that would not stay."""
    _checked_parts(unwrap(model))


def _checked_parts(model: Any) -> tuple[Stack, Tensor, Tensor]:
    if getattr(model, "_posswap", None) is not None:
        raise AlreadyPatchedError(
            f"{type(model).__name__} carries a swap: call centre_table before patch_model, or unpatch_model first."
        )
    refuse_wrapped_parts(model)
    return _parts(model)


def _parts(model: Any) -> tuple[Stack, Tensor, Tensor]:
    """Return the one stack, and the weights of its table and of the token embeddings that the table is added to.

    Raises:
        UnsupportedSwapError: `model` is not of that kind.
    """
    stacks, name = locate(model).stacks, type(model).__name__
    stack = stacks[0]
    if len(stacks) > 1 or stack.inputs == "images":
        what = "sees images" if stack.inputs == "images" else "has several stacks, which share their token embeddings"
        raise UnsupportedSwapError(f"centre_table works in models of one stack that reads tokens; {name} {what}.")
    if not isinstance(stack.table, TokenTable) or stack.table.computed:
        raise UnsupportedSwapError(
            f"centre_table needs a position table that checkpoints hold, and {name} has none: there is no mean to keep."
        )
    table, words = model.get_submodule(stack.table.path).weight, model.get_input_embeddings().weight
    if table.shape[1:] != words.shape[1:]:
        raise UnsupportedSwapError(
            f"centre_table: the table of {name} is {table.shape[1]} wide and its token embeddings {words.shape[1]}: "
            "they are not added to each other."
        )
    for weight in (table, words):
        if weight.device.type == "meta" or weight.dtype not in (torch.float32, torch.float64):
            raise UnsupportedSwapError(
                f"centre_table adds to weights, and needs float32 or float64 numbers in memory; {name} has "
                f"{weight.dtype} on {weight.device.type}. Load it with dtype=torch.float32."
            )
    return stack, table, words


def _scale(model: Any) -> float:
    """Return what the token embeddings are multiplied by before the table is added."""
    return float(getattr(model.get_input_embeddings(), "embed_scale", None) or 1.0)


def _outputs(model: Any, stack: Stack) -> Tensor:
    """Return the outputs of `model` on a few tokens; log-probabilities where its head is tied to its embeddings."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    length = min(_PROBED, stack.geometry.original_length)
    chosen = torch.randint(words.weight.shape[0], (2, length), generator=torch.Generator().manual_seed(0))
    was_training = model.training
    model.eval()
    try:
        found = model(input_ids=chosen.to(words.weight.device))[0].float()
    finally:
        model.train(was_training)
    tied = isinstance(head, nn.Module) and head.weight is words.weight
    return found.log_softmax(dim=-1) if tied else found
