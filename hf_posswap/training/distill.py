"""Staying close to the unswapped model: its next-token distributions as targets, within its window or sliding on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.compat.transformers_calls import forward_parameters
from hf_posswap.errors import ConfigError, DataError
from hf_posswap.families import locate
from hf_posswap.patching.apply.patch_model import unpatch_model
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.training.chunked_loss import IGNORED, sum_in_chunks
from hf_posswap.training.head import Apart, chosen, run_apart, split
from hf_posswap.training.sliding import document_begins, sliding_states

Teacher = Literal["window", "sliding"]


@dataclass(frozen=True)
class DistillSettings:
    """How to stay close to the unswapped model.

    Attributes:
        weight: share of the divergence in the loss, the rest being cross-entropy; above 0 and at most 1.
        temperature: both distributions are flattened by it; the divergence is multiplied by its square
            (https://arxiv.org/abs/1503.02531).
        teacher: what the unswapped model teaches. window: the tokens of its first window, beyond which cross-entropy is
            alone. sliding: all tokens, from windows of its own length that overlap by half, so that the model learns
            to do with one long text what the old one does with windows; where texts are longer than a window it reads
            nearly two tokens for each.
        states: weight of the distance between both models' states after each layer but the last, added to the loss
            (https://arxiv.org/abs/1909.10351, equation 8): squared, as a share of the variance of the teacher's over
            the batch, the mean of layers and tokens. It tells every layer what to do, where the divergence tells the
            last one alone. 0: none.
    """

    weight: float = 0.5
    temperature: float = 1.0
    teacher: Teacher = "window"
    states: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.weight <= 1:
            problems.append(f"weight lies above 0 and is at most 1, got {self.weight!r}")
        if not 0 < self.temperature < float("inf"):
            problems.append(f"temperature is a number above 0, got {self.temperature!r}")
        if not 0 <= self.states < float("inf"):
            problems.append(f"states is a number of at least 0, got {self.states!r}")
        if self.teacher not in get_args(Teacher):
            problems.append(f"teacher is one of {', '.join(get_args(Teacher))}, got {self.teacher!r}")
        if problems:
            raise ConfigError(f"distill: {'; '.join(problems)}.")


def make_teacher(model: Any) -> Any:
    """Return a frozen copy of the swapped `model` as it was before the swap, in eval mode, on the same device.

    Args:
        model: swapped in this process, its weights not yet trained, without adapters.

    Raises:
        ConfigError: it carries no swap, was loaded with one, or was fitted: what was there before is not known.

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
        held = "carries no swap" if patch is None else "was loaded with its swap, and its old positions are gone"
        raise ConfigError(
            f"distillation learns from the unswapped model, and {type(unwrap(model)).__name__} {held}: start from the "
            "unswapped checkpoint."
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
    """Return cross-entropy on all tokens, mixed with KL(teacher || model) on those that the teacher reads.

    These are the first `window` tokens of each row; under `settings.teacher` "sliding" all of them. For each counted
    token (1 - w) CE + w T^2 KL where the teacher reads, with `settings.states` times the distance of the states beside,
    and CE beyond; both summed over the tokens and divided by their number. Neither model holds the logits of more than
    `chunk` tokens.

    Args:
        model: that learns: a causal model, or a wrapper around one.
        teacher: a causal model of the same vocabulary, from `make_teacher` or another. It reads the rows' tokens at
            ordinary positions, behind padding from its end on, and of packed documents each from its beginning.
            Sliding, each window begins at position 0.
        inputs: arguments of the forward, with `labels` [B, L].
        settings: how much, how flat.
        window: tokens that the teacher can read.
        chunk: tokens whose logits are held at a time.
        num_items: what sums are divided by; None: the counted tokens.

    Raises:
        OptionError: `chunk` is not positive.
        DataError: no token is counted, or the teacher cannot read the mask (see `document_begins`).
        ConfigError: the two models have vocabularies of different sizes.
        UnsupportedModelError: a body cannot be told from its head.
    """
    labels = inputs["labels"]
    targets = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]  # [B, L]
    counted = targets != IGNORED
    if num_items is None and not counted.any():
        raise DataError("no token of this batch is counted: its labels are all -100. Give text to predict.")
    given = {name: value for name, value in inputs.items() if name != "labels"}
    taught = counted if settings.teacher == "sliding" else _first(counted, window)  # [B, L]
    beyond = counted & ~taught
    hidden = settings.states > 0
    if settings.teacher == "sliding":
        known = sliding_states(teacher, given, taught, window, hidden=hidden)
    else:
        known = _window_states(teacher, given, taught, window, hidden=hidden)
    near_targets, far_targets = targets[taught], targets[beyond]

    def use(apart: Apart) -> Tensor:
        def near(some: Tensor, where: slice) -> Tensor:
            with torch.no_grad():
                wanted = known.head(known.states[where])
            return _mixed(apart.head(some), wanted, near_targets[where], settings)

        def far(some: Tensor, where: slice) -> Tensor:
            return functional.cross_entropy(apart.head(some).float(), far_targets[where], reduction="sum")

        ours = chosen(apart, taught)
        total = sum_in_chunks(near, ours.states, chunk) + sum_in_chunks(far, apart.states[beyond], chunk)
        if hidden:
            total = total + settings.states * _apart_by(ours.hidden, known.hidden)
        return total / (counted.sum() if num_items is None else num_items)

    return run_apart(model, given, use, hidden=hidden)


def _apart_by(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """Return the sum over tokens of the squared distance of states [N, E], by their variance, the mean over layers."""
    distances = []
    for states, known in zip(ours, theirs, strict=True):
        wanted = known.float()
        variance = (wanted - wanted.mean(dim=0)).square().sum(dim=1).mean().clamp_min(torch.finfo(torch.float32).tiny)
        distances.append((states.float() - wanted).square().sum() / variance)
    return torch.stack(distances).mean() if len(ours[0]) else ours[0].sum()


def _first(counted: Tensor, window: int) -> Tensor:
    """Return which of the tokens `counted`, bool [B, L], are among the first `window` of their row."""
    return counted & (torch.arange(counted.shape[1], device=counted.device) < window)


def _window_states(teacher: Any, given: dict[str, Any], taught: Tensor, window: int, *, hidden: bool) -> Apart:
    """Return the teacher's states of the tokens `taught`, [N, E] each, all in its first window, and its head."""
    read = min(window, taught.shape[1])
    with torch.no_grad():
        return chosen(split(teacher, _teacher_inputs(teacher, given, read), hidden=hidden), taught[:, :read])


def _teacher_inputs(teacher: Any, given: dict[str, Any], read: int) -> dict[str, Any]:
    """Return the first `read` tokens, their mask, and their positions where those are not what a forward counts.

    Positions of the model that learns may jump (data.packing pose), so under a mask they are counted again: behind
    padding, or from the beginning of each document. Without a mask they are what tells packed documents apart.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    found = {"input_ids": given["input_ids"][:, :read]}
    if mask is None:
        return found if positions is None else found | {"position_ids": positions[:, :read]}
    if mask.ndim == 2:
        found["attention_mask"] = mask[:, :read]
        if positions is None or not bool((mask.diff(dim=1) > 0).any()):
            return found
        counted = (mask.cumsum(dim=1) - 1).clamp_min(0)
    elif positions is None:
        document_begins(given)
        return found | {"attention_mask": mask[..., :read, :read]}
    else:
        found["attention_mask"] = mask[..., :read, :read]
        index = torch.arange(given["input_ids"].shape[1], device=given["input_ids"].device)
        counted = index - document_begins(given)
    original = unwrap(teacher)
    if not any("position_ids" in forward_parameters(type(part)) for part in (original, original.base_model)):
        return found  # its distances come from the mask or need no positions
    return found | {"position_ids": counted[:, :read] + locate(original).first_position}


def _mixed(ours: Tensor, wanted: Tensor, targets: Tensor, settings: DistillSettings) -> Tensor:
    """Return the sum of (1 - w) CE + w T^2 KL over some tokens, from logits [C, V] of both."""
    if ours.shape != wanted.shape:
        raise ConfigError(
            f"distillation compares distributions over the same vocabulary; the model's has {ours.shape[-1]} tokens "
            f"and the teacher's {wanted.shape[-1]}: use a teacher with the same tokenizer."
        )
    ours, heat, share = ours.float(), settings.temperature, settings.weight
    learned = (ours / heat).log_softmax(-1)
    known = (wanted.float() / heat).log_softmax(-1)
    divergence = functional.kl_div(learned, known, reduction="sum", log_target=True)
    return (1 - share) * functional.cross_entropy(ours, targets, reduction="sum") + share * heat**2 * divergence
