"""Attention relations: how alike the queries of two tokens are, and their keys and values, in two models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posswap.compat.transformers_attention import (
    IMPLEMENTATION,
    attention_implementation,
    register_attention_function,
)
from hf_posswap.errors import ConfigError
from hf_posswap.patching.sites.attention.call import CALL_ARGUMENT
from hf_posswap.patching.sites.attention.config_view import ConfigView
from hf_posswap.patching.sites.attention.function import has_interface, implementation
from hf_posswap.training.head import attribute

RECORDER = "posswap_relations"
_MOST_SCORES = 2**24
"""Scores of one block of queries that are held at once."""


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


def _record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    view = module.config
    view.layers.append(Attended(query, key, value, kwargs.get(CALL_ARGUMENT)))
    with attribute(module, "config", view.native):
        attend, target = implementation(module, view.native, attention_implementation(view.native))
        return attend(target, query, key, value, mask, **kwargs)


register_attention_function(RECORDER, _record)


@contextmanager
def recorded_attention(model: Any) -> Iterator[list[Attended]]:
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
    def forward(ctx: Any, student: Tensor, teacher: Tensor, rows: Tensor, begins: Tensor) -> Tensor:
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
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer.to(gradient.dtype), None, None, None


def _log_relation(vectors: Tensor, queries: slice, stop: int, scale: float, seen: Tensor) -> Tensor:
    scores = vectors[:, :, queries] @ vectors[:, :, :stop].mT * scale
    return scores.masked_fill(~seen, float("-inf")).log_softmax(-1)
