"""Moving the mean of a position table, which carries no position, to the token embeddings, which a swap keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.errors import AlreadyPatchedError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.sites import Stack, TokenTable
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.plan.plan_swap import refuse_wrapped_parts, unwrap
from hf_posswap.utils.devices import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CENTRED = "_posswap_centred"
"""Attribute of a model whose token embeddings include the mean of its table, unlike those in its checkpoint."""
_PROBED = 16
"""Most tokens of each of the two sequences on which the outputs are compared."""
_ALLOWED = 1e-3
"""Largest allowed change of an output, relative to the largest output, because of float32 rounding."""


@alone(parameters=False)
@torch.no_grad()
def centre_table(model: PreTrainedModel) -> Tensor:
    """Move the mean row of the position table of `model` into its token embeddings, and return that row [E].

    For all rows p and all tokens t: p' = p - mean, t' = t + mean. The model only sees the sum of both, which does not
    change. If the head is tied to the token embeddings, every logit moves by the same number and the probabilities do
    not change. A swap that removes the table afterwards then removes only positions, and not a vector that the first
    layer has always seen: the swapped model starts closer to the original and adapts in fewer tokens. Call it before
    `patch_model`. The outputs are compared on a small input, and the change is undone if they differ.

    It changes weights. Afterwards an adapter on the swapped model cannot be saved, because its base checkpoint has
    other weights. Save and reload the model before you add an adapter.

    Args:
        model: of one stack that reads tokens, with a position table, in float32 or float64, not swapped.

    Raises:
        UnsupportedSwapError: another type of model, weights of another dtype, or outputs that would change.
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
    stack, table, embeddings = _checked_weights(model)
    mean = table[stack.table_offset :].mean(dim=0)
    kept = table.clone(), embeddings.clone()
    before = _outputs(model, stack)
    table -= mean
    embeddings += mean / _scale(model)
    moved = float((_outputs(model, stack) - before).abs().max() / before.abs().max())
    if not moved <= _ALLOWED:
        table.copy_(kept[0]), embeddings.copy_(kept[1])
        raise UnsupportedSwapError(
            f"centre_table: the outputs of {type(model).__name__} would change by {moved:.1e} of the largest, more "
            f"than by rounding: its table and its token embeddings are not simply added. The model is unchanged."
        )
    setattr(model, CENTRED, True)
    return mean


def check_centring(model: PreTrainedModel) -> None:
    """Refuse a `model` that `centre_table` does not support; raises its errors, but does not compare outputs.

    The model may be on meta: it is to be loaded in its dtype.
    """
    _checked_weights(unwrap(model), runs=False)


def _checked_weights(model: PreTrainedModel, *, runs: bool = True) -> tuple[Stack, Tensor, Tensor]:
    if getattr(model, "_posswap", None) is not None:
        raise AlreadyPatchedError(
            f"{type(model).__name__} carries a swap: call centre_table before patch_model, or unpatch_model first."
        )
    refuse_wrapped_parts(model)
    return _weights(model, runs=runs)


def _weights(model: Any, *, runs: bool = True) -> tuple[Stack, Tensor, Tensor]:
    """Return the one stack, and the weights of its table and of the token embeddings that the table is added to.

    Raises:
        UnsupportedSwapError: `model` is of another type.
    """
    stacks, name = locate(model).stacks, type(model).__name__
    stack = stacks[0]
    if len(stacks) > 1 or stack.inputs == "images":
        reason = "sees images" if stack.inputs == "images" else "has several stacks, which share their token embeddings"
        raise UnsupportedSwapError(f"centre_table works in models of one stack that reads tokens; {name} {reason}.")
    if not isinstance(stack.table, TokenTable) or stack.table.computed:
        raise UnsupportedSwapError(
            f"centre_table needs a position table in checkpoints, and {name} has none: there is no mean to keep."
        )
    table, embeddings = model.get_submodule(stack.table.path).weight, model.get_input_embeddings().weight
    if table.shape[1:] != embeddings.shape[1:]:
        raise UnsupportedSwapError(
            f"centre_table: the table of {name} is {table.shape[1]} wide and its token embeddings "
            f"{embeddings.shape[1]}: they are not added to each other."
        )
    for weight in (table, embeddings):
        if (runs and weight.device.type == "meta") or weight.dtype not in (torch.float32, torch.float64):
            raise UnsupportedSwapError(
                f"centre_table adds to weights, and needs float32 or float64 numbers in memory; {name} has "
                f"{weight.dtype} on {weight.device.type}. Load it with dtype=torch.float32."
            )
    return stack, table, embeddings


def _scale(model: PreTrainedModel) -> float:
    """Return the factor on the token embeddings before the table is added."""
    return float(getattr(model.get_input_embeddings(), "embed_scale", None) or 1.0)


def _outputs(model: Any, stack: Stack) -> Tensor:
    """Return the outputs of `model` on a few tokens; log-probabilities if its head is tied to its embeddings."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    length = min(_PROBED, stack.geometry.original_length)
    chosen = torch.randint(embeddings.weight.shape[0], (2, length), generator=torch.Generator().manual_seed(0))
    with evaluating(model):
        outputs = model(input_ids=chosen.to(embeddings.weight.device))[0].float()
    tied = isinstance(head, nn.Module) and head.weight is embeddings.weight
    return outputs.log_softmax(dim=-1) if tied else outputs
