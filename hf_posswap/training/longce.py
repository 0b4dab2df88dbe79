"""LongCE: cross-entropy that weighs each token by how much the text beyond a short context helps to predict it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import ConfigError, DataError
from hf_posswap.families import locate
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.training.chunked_loss import IGNORED, sum_in_chunks
from hf_posswap.training.head import BodyAndHead, document_begins, inner_model, run_body_and_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LongCESettings:
    """How tokens are weighed, https://arxiv.org/abs/2410.23771, equation 8.

    Attributes:
        context: tokens of the short context, even. The model reads the text again in windows of so many tokens that
            overlap by half, without a gradient: nearly two tokens more per token, a forward without a backward.
        clip: largest weight. The weight of a token is exp(its loss with the short context less its loss with all of
            the text before it), at most this; 1 where the short context is all of the text before it.
    """

    context: int = 4096
    clip: float = 5.0

    def __post_init__(self) -> None:
        problems = []
        if self.context < 2 or self.context % 2:
            problems.append(f"context is an even number of at least 2 tokens, got {self.context!r}")
        if not 1 <= self.clip < float("inf"):
            problems.append(f"clip is a number of at least 1, got {self.clip!r}")
        if problems:
            raise ConfigError(f"longce: {'; '.join(problems)}.")


def longce_loss(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    settings: LongCESettings,
    *,
    chunk: int,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Return the cross-entropy of a causal model in which each token has a weight, the sum divided by the tokens.

    The weight of a token is min(exp(l_short - l_full), clip), where l_full is its loss in this forward and l_short its
    loss with a context of at most `settings.context` tokens and at least half of that. No gradient passes through it.

    Args:
        model: a causal model, possibly wrapped.
        inputs: arguments of its forward, with `labels` [B, L]; rows may end in padding, and packed documents are
            separated by `position_ids` or a mask [B, 1, L, L].
        settings: context and clip.
        chunk: tokens whose logits are held at a time.
        num_items: divisor of the sum; None: the counted tokens.

    Raises:
        OptionError: `chunk` is not positive.
        DataError: all labels are -100, or `document_begins` cannot read the mask.
        UnsupportedModelError: the body cannot be separated from the head.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()
        >>> ids = torch.arange(10)[None]
        >>> loss = longce_loss(model, {"input_ids": ids, "labels": ids}, LongCESettings(context=16), chunk=4)
        >>> torch.allclose(loss, model(input_ids=ids, labels=ids).loss)  # the short context is the whole text
        True
    """
    labels = inputs["labels"]
    targets = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]  # [B, L]
    counted = targets != IGNORED
    if num_items is None and not counted.any():
        raise DataError("no token of this batch is counted: its labels are all -100. Give text to predict.")
    model_inputs = {name: value for name, value in inputs.items() if name != "labels"}
    losses, is_cut = _short_losses(model, model_inputs, targets, settings.context, chunk)
    short_losses, is_short, chosen_targets = losses[counted], is_cut[counted], targets[counted]  # [N] each

    def use(apart: BodyAndHead) -> Tensor:
        def chunk_loss(states: Tensor, span: slice) -> Tensor:
            full = functional.cross_entropy(apart.head(states).float(), chosen_targets[span], reduction="none")
            gain = torch.where(is_short[span], short_losses[span] - full.detach(), 0.0)
            return (gain.exp().clamp_max(settings.clip) * full).sum()

        return sum_in_chunks(chunk_loss, apart.states[counted], chunk) / (
            counted.sum() if num_items is None else num_items
        )

    return run_body_and_head(model, model_inputs, use)


@torch.no_grad()
def _short_losses(
    model: PreTrainedModel, inputs: dict[str, Any], targets: Tensor, context: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return the losses with the short context, [B, L], and which tokens have one that is cut, bool [B, L].

    The windows follow from the shape of the batch alone, so that all processes run the same number of forwards.
    """
    ids = inputs["input_ids"]
    length, stride = ids.shape[1], context // 2
    losses, is_cut = torch.zeros(ids.shape, device=ids.device), torch.zeros_like(ids, dtype=torch.bool)
    if length <= context:
        return losses, is_cut
    begins = document_begins(inputs)
    for start in range(stride, length - stride, stride):  # each gives the tokens of its second half
        window = slice(start, min(start + context, length))
        index = torch.arange(window.start, window.stop, device=ids.device)
        window_inputs = {"input_ids": ids[:, window]}
        inside = begins[:, window].clamp_min(start)
        if bool((inside > start).any()):  # packed documents
            if (mask := inputs.get("attention_mask")) is not None:
                window_inputs["attention_mask"] = mask[..., window, window]
            if "position_ids" in inputs:
                first_position = locate(unwrap(inner_model(model))).first_position
                window_inputs["position_ids"] = index - inside + first_position
        wanted = (index >= start + stride) & (begins[:, window] < start) & (targets[:, window] != IGNORED)
        is_cut[:, window] |= wanted
        _write_losses(model, window_inputs, targets[:, window], wanted, losses[:, window], chunk)
    return losses, is_cut


def _write_losses(
    model: PreTrainedModel, inputs: dict[str, object], targets: Tensor, wanted: Tensor, losses: Tensor, chunk: int
) -> None:
    """Write the losses of the tokens `wanted` [B, K] into `losses`; the model runs even if none is."""

    def use(apart: BodyAndHead) -> Tensor:
        states, chosen_targets = apart.states[wanted], targets[wanted]
        losses_by_chunk = [
            functional.cross_entropy(
                apart.head(states[at : at + chunk]).float(), chosen_targets[at : at + chunk], reduction="none"
            )
            for at in range(0, len(states), chunk)
        ]
        if losses_by_chunk:
            losses[wanted] = torch.cat(losses_by_chunk)
        return apart.states.new_zeros(())

    run_body_and_head(model, inputs, use)
