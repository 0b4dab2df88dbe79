"""Distillation from the unswapped model: its next-token distributions, or its attention relations, as targets.

The teacher reads each text in its window or, beyond it, in sliding windows. Attention relations say how alike the
queries of two tokens are, and their keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_posswap.compat.torch_modules import copy_module
from hf_posswap.compat.transformers_attention import (
    IMPLEMENTATION,
    attention_implementation,
    register_attention_function,
)
from hf_posswap.compat.transformers_calls import forward_parameters
from hf_posswap.errors import ConfigError, DataError
from hf_posswap.families import locate
from hf_posswap.patching.apply.patch_model import unpatch_model
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.sites.attention.call import CALL_ARGUMENT
from hf_posswap.patching.sites.attention.function import ConfigView, has_interface, implementation
from hf_posswap.training.chunked_loss import IGNORED, sum_in_chunks
from hf_posswap.training.head import (
    BodyAndHead,
    attribute,
    chosen,
    document_begins,
    inner_model,
    run_body_and_head,
    sliding_states,
    split,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.autograd.function import FunctionCtx
    from transformers import PreTrainedModel

    class _Context(FunctionCtx):
        """What the forward keeps for the backward."""

        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]


RECORDER = "posswap_relations"
_MOST_SCORES = 2**24
"""Scores of one block of queries that are held at once."""
_LEAST_VARIANCE = 1e-4
"""The least variance that states are taken to have, in their mean square."""
Teacher = Literal["window", "sliding"]


@dataclass(frozen=True)
class Attended:
    """What one layer attends with.

    Attributes:
        query: before the scheme, [B, H, L, D].
        key: likewise, [B, G, L, D].
        value: [B, G, L, E].
        call: of the scheme; None: the layer is not swapped inside attention.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    call: Any

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as they are attended with; the forward must still be running.

        Raises:
            ConfigError: the scheme rotates them in two ways.
        """
        if self.call is None:
            return self.query, self.key, self.value
        if self.call.mechanism.splits:
            raise ConfigError(
                "objective.distill.relations compares queries with queries, and this scheme rotates them differently "
                "for near and far keys: set relations to 0."
            )
        return *self.call.rotate(self.query, self.key), self.value


class _RecordingView(ConfigView):
    """The config of one attention module that also records what the module attends with."""

    def __init__(self, native: Any, layers: list[Attended]) -> None:
        super().__init__(native)
        object.__setattr__(self, "layers", layers)

    def __getattr__(self, name: str) -> Any:
        return RECORDER if name == IMPLEMENTATION else super().__getattr__(name)


def _record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: object
) -> tuple[Tensor, Tensor | None]:
    view = module.config
    view.layers.append(Attended(query, key, value, kwargs.get(CALL_ARGUMENT)))
    with attribute(module, "config", view.native):
        attend, target = implementation(module, view.native, attention_implementation(view.native))
        return attend(target, query, key, value, mask, **kwargs)


register_attention_function(RECORDER, _record)


@contextmanager
def recorded_attention(model: PreTrainedModel) -> Iterator[list[Attended]]:
    """Record what each attention layer of `model` attends with in forwards within the block, in the order of the calls.

    Args:
        model: without wrappers.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()
        >>> with recorded_attention(model) as layers:
        ...     _ = model(torch.arange(10)[None])
        >>> [tuple(layer.query.shape) for layer in layers]
        [(1, 2, 10, 4), (1, 2, 10, 4)]
    """
    layers: list[Attended] = []
    with ExitStack() as stack:
        for module in model.modules():
            if has_interface(module):
                stack.enter_context(attribute(module, "config", _RecordingView(module.config, layers)))
        yield layers


def relation_divergence(
    student: Sequence[Attended], teacher: Sequence[Attended], rows: Tensor, begins: Tensor
) -> Tensor:
    """Return the divergence of the student's relations from the teacher's, summed over the tokens of `rows`.

    A token's relation to itself and the tokens before it in its document is softmax(x x^T / sqrt(D)), x the queries of
    one head; likewise of keys and of values. The divergences KL(teacher || student) of the three are added, and
    averaged over heads and layers (https://arxiv.org/abs/2604.00004; https://arxiv.org/abs/2012.15828, section 3.2).
    Neither model's [L, L] relations are held, only those of a block of tokens.

    Args:
        student: its layers on L tokens or more; the first L are compared.
        teacher: its layers on L tokens.
        rows: tokens that count, bool [B, L].
        begins: index at which the document of each token begins, int64 [B, L].

    Raises:
        ConfigError: the two have other numbers of layers or heads, or no gradient reaches the student's.
    """
    if not teacher or len(student) != len(teacher):
        raise ConfigError(
            "objective.distill.relations needs models whose layers attend through transformers' AttentionInterface; "
            f"{len(teacher)} layers of the unswapped model do, and {len(student)} of the swapped one: set it to 0."
        )
    if torch.is_grad_enabled() and not any(layer.query.requires_grad for layer in student):
        raise ConfigError(
            "objective.distill.relations gets no gradient from the attention of this model: its activation "
            "checkpointing is reentrant (set training.gradient_checkpointing_kwargs.use_reentrant=false), or nothing "
            "below its attention is trained (see trainable)."
        )
    length, total = rows.shape[1], []
    for layer, taught in zip(student, teacher, strict=True):
        for ours, theirs in zip(layer.rotated(), taught.rotated(), strict=True):
            if ours.shape[1] != theirs.shape[1]:
                raise ConfigError(
                    "objective.distill.relations compares head with head; a layer of the swapped model has "
                    f"{ours.shape[1]} where the unswapped one has {theirs.shape[1]}: set it to 0."
                )
            total.append(_Divergence.apply(ours[:, :, :length], theirs, rows, begins))
    return torch.stack(total).sum() / len(teacher)


class _Divergence(torch.autograd.Function):
    """The sum over rows of the mean over heads of KL(teacher || student), with its gradient from the same pass."""

    @staticmethod
    def forward(ctx: _Context, student: Tensor, teacher: Tensor, rows: Tensor, begins: Tensor) -> Tensor:
        batch, heads, length, _ = student.shape
        ours, theirs = student.float(), teacher.float()
        gradient = torch.zeros_like(ours) if ctx.needs_input_grad[0] else None
        index = torch.arange(length, device=ours.device)
        total = ours.new_zeros(())
        block = max(1, _MOST_SCORES // (batch * heads * length))
        for start in range(0, length, block):
            stop = min(start + block, length)
            queries = slice(start, stop)
            seen = (index[:stop] >= begins[:, queries, None]) & (index[:stop] <= index[queries, None])  # [B, C, stop]
            seen = (seen | (index[:stop] == index[queries, None]))[:, None]  # a padding token sees itself
            counts = rows[:, None, queries, None].float() / heads
            scale = ours.shape[-1] ** -0.5
            log_ours = _log_relation(ours, queries, stop, scale, seen)
            log_theirs = _log_relation(theirs, queries, stop, theirs.shape[-1] ** -0.5, seen)
            probabilities = log_theirs.exp()
            difference = torch.where(seen, log_theirs - log_ours, 0.0)
            total += (probabilities * difference * counts).sum()
            if gradient is not None:
                of_scores = (log_ours.exp() - probabilities) * counts * scale  # [B, H, C, stop]
                gradient[:, :, queries] += of_scores @ ours[:, :, :stop]
                gradient[:, :, :stop] += of_scores.mT @ ours[:, :, queries]
        if gradient is not None:
            ctx.save_for_backward(gradient.to(student.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer.to(gradient.dtype), None, None, None


def _log_relation(vectors: Tensor, queries: slice, stop: int, scale: float, seen: Tensor) -> Tensor:
    scores = vectors[:, :, queries] @ vectors[:, :, :stop].mT * scale
    return scores.masked_fill(~seen, float("-inf")).log_softmax(-1)


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
            teacher's states over the tokens of the forward, averaged over layers and tokens. It gives every layer a
            target; the divergence gives only the last layer one. A forward of one token adds nothing. 0: none.
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


def make_teacher(model: PreTrainedModel) -> PreTrainedModel:
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
    teacher = unpatch_model(copy_module(unwrap(model)))
    return teacher.requires_grad_(False).eval()


def distillation_loss(
    model: nn.Module,
    teacher: nn.Module,
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


def _recorded(model: PreTrainedModel, settings: DistillSettings) -> AbstractContextManager[list[Attended]]:
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
    if len(at[0]) < 2:  # which have no variance
        return student[0][taught][:0].sum()
    distances = [_StateDistance.apply(states, target, *at) for states, target in zip(student, teacher, strict=True)]
    return torch.stack(distances).mean()


class _StateDistance(torch.autograd.Function):
    """The distance of one layer's states; between forward and backward it holds nothing that is not held already."""

    @staticmethod
    def forward(ctx: _Context, states: Tensor, target: Tensor, row: Tensor, index: Tensor) -> Tensor:
        wanted = target.float()
        # Where all states are equal, as those of a repeated token, a share of their size stands for the variance.
        floor = wanted.square().sum(dim=1).mean() * _LEAST_VARIANCE + torch.finfo(torch.float32).tiny
        variance = (wanted - wanted.mean(dim=0)).square().sum(dim=1).mean().clamp_min(floor)
        ctx.save_for_backward(states, target, row, index, variance)
        return (states[row, index].float() - wanted).square_().sum() / variance

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, target, row, index, variance = ctx.saved_tensors
        apart = (states[row, index].float() - target.float()).mul_(2 * grad / variance)
        to_states = torch.zeros_like(states)
        to_states[row, index] = apart.to(states.dtype)
        return to_states, None, None, None


def _first(counted: Tensor, window: int) -> Tensor:
    """Return which of the tokens `counted`, bool [B, L], are among the first `window` of their row."""
    return counted & (torch.arange(counted.shape[1], device=counted.device) < window)


def _window_states(
    teacher: nn.Module, model_inputs: dict[str, object], taught: Tensor, window: int, *, hidden: bool
) -> BodyAndHead:
    """Return the teacher's states of the tokens `taught`, [N, E] each, all in its first window, and its head."""
    length = min(window, taught.shape[1])
    with torch.no_grad():
        return chosen(split(teacher, _teacher_inputs(teacher, model_inputs, length), hidden=hidden), taught[:, :length])


def _teacher_inputs(teacher: nn.Module, model_inputs: dict[str, Any], length: int) -> dict[str, object]:
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
        ctx: _Context, student: Tensor, teacher: Tensor, targets: Tensor, weight: float, temperature: float
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
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None
