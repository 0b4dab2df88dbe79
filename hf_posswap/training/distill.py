"""Distillation from the unswapped model: its next-token distributions as targets, in its window or sliding windows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_posswap.compat.transformers_calls import forward_parameters
from hf_posswap.errors import ConfigError, DataError
from hf_posswap.families import locate
from hf_posswap.patching.apply.patch_model import unpatch_model
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.training.chunked_loss import IGNORED, sum_in_chunks
from hf_posswap.training.head import BodyAndHead, chosen, inner_model, run_body_and_head, split
from hf_posswap.training.relations import Attended, recorded_attention, relation_divergence
from hf_posswap.training.sliding import document_begins, sliding_states

Teacher = Literal["window", "sliding"]


@dataclass(frozen=True)
class DistillSettings:
    """How to stay close to the unswapped model.

    Attributes:
        weight: weight of the divergence in the loss, the rest being cross-entropy; above 0 and at most 1.
        temperature: softens both distributions; the divergence is multiplied by its square
            (https://arxiv.org/abs/1503.02531).
        teacher: which tokens the unswapped model teaches. window: those of its first window; beyond it the loss is
            cross-entropy alone. sliding: all tokens, from windows of its length that overlap by half, so that the model
            learns to match windows of the old model on one long text; for texts longer than a window, the teacher
            reads nearly two tokens per token.
        states: weight of the distance between both models' states after each layer but the last, added to the loss
            (https://arxiv.org/abs/1909.10351, equation 8): the squared distance divided by the variance of the
            teacher's states over the batch, averaged over layers and tokens. It gives every layer a target; the
            divergence gives only the last layer one. 0: none.
        relations: weight of the divergence of both models' attention relations, added to the loss: which tokens have
            similar queries, similar keys, similar values (https://arxiv.org/abs/2604.00004). It restores the attention
            of a model whose rotation was rescaled, with few tokens. For the teacher window. 0: none.
    """

    weight: float = 0.5
    temperature: float = 1.0
    teacher: Teacher = "window"
    states: float = 0.0
    relations: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.weight <= 1:
            problems.append(f"weight lies above 0 and is at most 1, got {self.weight!r}")
        if not 0 < self.temperature < float("inf"):
            problems.append(f"temperature is a number above 0, got {self.temperature!r}")
        for name in ("states", "relations"):
            if not 0 <= getattr(self, name) < float("inf"):
                problems.append(f"{name} is a number of at least 0, got {getattr(self, name)!r}")
        if self.teacher not in get_args(Teacher):
            problems.append(f"teacher is one of {', '.join(get_args(Teacher))}, got {self.teacher!r}")
        elif self.relations and self.teacher != "window":
            problems.append(f"relations is for the teacher window, which reads the same rows, not {self.teacher}")
        if problems:
            raise ConfigError(f"distill: {'; '.join(problems)}.")


def make_teacher(model: Any) -> Any:
    """Return a frozen copy of the swapped `model` as it was before the swap, in eval mode, on the same device.

    Args:
        model: swapped in this process, its weights not yet trained, without adapters.

    Raises:
        ConfigError: the model has no swap, was loaded with one, or was fitted, so the unswapped model is not known.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()
        >>> ids = torch.arange(10)[None]
        >>> before = model(ids).logits
        >>> model = patch_model(model, "rope", max_length=32)
        >>> torch.equal(make_teacher(model)(ids).logits, before)
        True
    """
    patch = getattr(unwrap(model), "_posswap", None)
    if patch is None or not patch.can_undo:
        problem = "has no swap" if patch is None else "was loaded with its swap, so its old positions are unknown"
        raise ConfigError(
            f"distillation learns from the unswapped model, and {type(unwrap(model)).__name__} {problem}: start from "
            "the unswapped checkpoint."
        )
    if patch.fitted:
        raise ConfigError(
            "distillation learns from the unswapped model, and fit_rotation has changed this "
            f"{type(unwrap(model)).__name__}: make the teacher before the fit."
        )
    teacher = copy.deepcopy(unwrap(model))
    unpatch_model(teacher)
    return teacher.requires_grad_(False).eval()


def distillation_loss(
    model: Any,
    teacher: Any,
    inputs: dict[str, Any],
    settings: DistillSettings,
    *,
    window: int,
    chunk: int,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Return cross-entropy on all tokens, mixed with KL(teacher || model) on the tokens that the teacher reads.

    The teacher reads the first `window` tokens of each row, or all tokens if `settings.teacher` is "sliding". There the
    loss of a token is (1 - w) CE + w T^2 KL, plus `settings.states` times the distance of the states and
    `settings.relations` times the divergence of the relations; elsewhere it is CE. The losses are summed and divided by
    the number of counted tokens. Neither model holds the logits of more than `chunk` tokens.

    Args:
        model: the student: a causal model, or a wrapper around one.
        teacher: a causal model of the same vocabulary, from `make_teacher` or another. It reads the tokens at their
            usual positions: from 0 after padding, and from 0 in each packed document or sliding window.
        inputs: arguments of the forward, with `labels` [B, L].
        settings: weights and temperature.
        window: tokens that the teacher can read.
        chunk: tokens whose logits are held at a time.
        num_items: divisor of the sums; None: the counted tokens.

    Raises:
        OptionError: `chunk` is not positive.
        DataError: all labels are -100, or the teacher cannot read the mask (see `document_begins`).
        ConfigError: the two models have vocabularies of different sizes.
        UnsupportedModelError: a body cannot be separated from its head.
    """
    labels = inputs["labels"]
    targets = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]  # [B, L]
    counted = targets != IGNORED
    if num_items is None and not counted.any():
        raise DataError("no token of this batch is counted: its labels are all -100. Give text to predict.")
    model_inputs = {name: value for name, value in inputs.items() if name != "labels"}
    taught = counted if settings.teacher == "sliding" else _first(counted, window)  # [B, L]
    untaught = counted & ~taught
    hidden = settings.states > 0
    teacher_layers: list[Attended] = []
    if settings.teacher == "sliding":
        teacher_out = sliding_states(teacher, model_inputs, taught, window, hidden=hidden)
    else:
        with _recorded(unwrap(teacher), settings) as teacher_layers:
            teacher_out = _window_states(teacher, model_inputs, taught, window, hidden=hidden)
    taught_targets, untaught_targets = targets[taught], targets[untaught]

    def use(apart: BodyAndHead) -> Tensor:
        def taught_loss(chunk_states: Tensor, span: slice) -> Tensor:
            with torch.no_grad():
                teacher_logits = teacher_out.head(teacher_out.states[span])
            return _mixed_loss(apart.head(chunk_states), teacher_logits, taught_targets[span], settings)

        def untaught_loss(chunk_states: Tensor, span: slice) -> Tensor:
            return functional.cross_entropy(apart.head(chunk_states).float(), untaught_targets[span], reduction="sum")

        total = sum_in_chunks(taught_loss, apart.states[taught], chunk) + sum_in_chunks(
            untaught_loss, apart.states[untaught], chunk
        )
        if hidden:
            total = total + settings.states * _state_distance(apart.hidden, teacher_out.hidden, taught)
        if settings.relations:
            rows = taught[:, :window]
            divergence = relation_divergence(layers, teacher_layers, rows, _begins(model_inputs)[:, :window])
            total = total + settings.relations * divergence
        return total / (counted.sum() if num_items is None else num_items)

    with _recorded(inner_model(model), settings) as layers:
        return run_body_and_head(model, model_inputs, use, hidden=hidden)


def _recorded(model: Any, settings: DistillSettings) -> AbstractContextManager[list[Attended]]:
    return recorded_attention(model) if settings.relations else nullcontext([])


def _begins(inputs: dict[str, Any]) -> Tensor:
    """Return the index at which the document of each token begins, [B, L]; the first token after padding begins one."""
    mask = inputs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        return mask.int().argmax(dim=1, keepdim=True).expand(mask.shape)
    return document_begins(inputs)


def _state_distance(student: Sequence[Tensor], teacher: Sequence[Tensor], taught: Tensor) -> Tensor:
    """Return the squared distance of states over their variance, summed over tokens, averaged over layers.

    Args:
        student: states after each layer, [B, L, E] each.
        teacher: those of the tokens in `taught`, [N, E] each.
        taught: bool [B, L].
    """
    at = taught.nonzero(as_tuple=True)
    if not len(at[0]):
        return student[0][taught].sum()
    distances = [_StateDistance.apply(states, target, *at) for states, target in zip(student, teacher, strict=True)]
    return torch.stack(distances).mean()


class _StateDistance(torch.autograd.Function):
    """The distance of one layer's states; between forward and backward it holds nothing that is not held already."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, target: Tensor, row: Tensor, index: Tensor) -> Tensor:
        wanted = target.float()
        variance = (wanted - wanted.mean(dim=0)).square().sum(dim=1).mean().clamp_min(torch.finfo(torch.float32).tiny)
        ctx.save_for_backward(states, target, row, index, variance)
        return (states[row, index].float() - wanted).square_().sum() / variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, target, row, index, variance = ctx.saved_tensors
        apart = (states[row, index].float() - target.float()).mul_(2 * grad / variance)
        to_states = torch.zeros_like(states)
        to_states[row, index] = apart.to(states.dtype)
        return to_states, None, None, None


def _first(counted: Tensor, window: int) -> Tensor:
    """Return which of the tokens `counted`, bool [B, L], are among the first `window` of their row."""
    return counted & (torch.arange(counted.shape[1], device=counted.device) < window)


def _window_states(
    teacher: Any, model_inputs: dict[str, Any], taught: Tensor, window: int, *, hidden: bool
) -> BodyAndHead:
    """Return the teacher's states of the tokens `taught`, [N, E] each, all in its first window, and its head."""
    length = min(window, taught.shape[1])
    with torch.no_grad():
        return chosen(split(teacher, _teacher_inputs(teacher, model_inputs, length), hidden=hidden), taught[:, :length])


def _teacher_inputs(teacher: Any, model_inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the first `length` tokens, their mask, and their positions if a forward would not compute the same ones.

    The student's positions may jump (data.packing pose), so with a mask they are recomputed: after padding, or from
    the beginning of each document. Without a mask they are kept, because they separate packed documents.
    """
    mask, positions = model_inputs.get("attention_mask"), model_inputs.get("position_ids")
    teacher_inputs = {"input_ids": model_inputs["input_ids"][:, :length]}
    if mask is None:
        return teacher_inputs if positions is None else teacher_inputs | {"position_ids": positions[:, :length]}
    if mask.ndim == 2:
        teacher_inputs["attention_mask"] = mask[:, :length]
        if positions is None or not bool((mask.diff(dim=1) > 0).any()):
            return teacher_inputs
        counted = (mask.cumsum(dim=1) - 1).clamp_min(0)
    elif positions is None:
        document_begins(model_inputs)
        return teacher_inputs | {"attention_mask": mask[..., :length, :length]}
    else:
        teacher_inputs["attention_mask"] = mask[..., :length, :length]
        index = torch.arange(model_inputs["input_ids"].shape[1], device=model_inputs["input_ids"].device)
        counted = index - document_begins(model_inputs)
    original = unwrap(teacher)
    if not any("position_ids" in forward_parameters(type(module)) for module in (original, original.base_model)):
        return teacher_inputs  # its distances come from the mask or need no positions
    return teacher_inputs | {"position_ids": counted[:, :length] + locate(original).first_position}


def _mixed_loss(student_logits: Tensor, teacher_logits: Tensor, targets: Tensor, settings: DistillSettings) -> Tensor:
    """Return the sum of (1 - w) CE + w T^2 KL over a chunk of tokens, from both models' logits [C, V]."""
    if student_logits.shape != teacher_logits.shape:
        raise ConfigError(
            "distillation compares distributions over the same vocabulary; the model's has "
            f"{student_logits.shape[-1]} tokens and the teacher's {teacher_logits.shape[-1]}: use a teacher with the "
            "same tokenizer."
        )
    loss: Tensor = _MixedLoss.apply(student_logits, teacher_logits, targets, settings.weight, settings.temperature)
    return loss


class _MixedLoss(torch.autograd.Function):
    """Cross-entropy mixed with a divergence; the gradient is computed with the loss, in place of its logarithms.

    With p the softened model and q the softened teacher, the gradient of w T^2 KL is w T (p - q); that of cross-entropy
    is the model's distribution less 1 at the target.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, targets: Tensor, weight: float, temperature: float
    ) -> Tensor:
        wide = torch.promote_types(student.dtype, torch.float32)
        softened = 1.0 / temperature
        mine = (student.to(wide) * softened if temperature != 1 else student.to(wide)).log_softmax(-1)
        theirs = (teacher.to(wide) * softened if temperature != 1 else teacher.to(wide)).log_softmax(-1)
        chances = theirs.exp()
        divergence = theirs.sub_(mine).mul_(chances).sum()
        at = targets[:, None]
        unsoftened = mine if temperature == 1 else student.to(wide).log_softmax(-1)
        entropy = -unsoftened.gather(1, at).sum()
        if temperature == 1:
            gradient = mine.exp_().sub_(chances.mul_(weight))
        else:
            gradient = mine.exp_().sub_(chances).mul_(weight * temperature)
            gradient.add_(unsoftened.exp_(), alpha=1 - weight)
        gradient.scatter_add_(1, at, gradient.new_full(at.shape, weight - 1))
        ctx.save_for_backward(gradient.to(student.dtype))
        return (1 - weight) * entropy + weight * temperature**2 * divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None
