"""Losses that hold the logits of a chunk of tokens at a time, never [L, V]: forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import DataError, OptionError
from hf_posswap.training.head import Apart, run_apart

IGNORED = -100
ChunkLoss = Callable[[Tensor, slice], Tensor]
"""From some of the states [C, E], and which of them all they are, to the sum of their tokens' losses."""


def causal_loss(model: Any, inputs: dict[str, Any], *, chunk: int, num_items: Tensor | int | None = None) -> Tensor:
    """Return the next-token loss of a causal model, a scalar with a gradient, as `model(**inputs).loss` does.

    The body runs once. The head then runs on `chunk` tokens at a time and its gradients are taken at once, as in
    https://arxiv.org/abs/2410.10989, section 3.2, so that neither forward nor backward holds all logits.

    Args:
        model: a causal model, or a PEFT, DDP or FSDP2 wrapper around one.
        inputs: arguments of its forward, with `labels` [B, L], or `shift_labels` [B, L] that are shifted already; -100
            is not counted.
        chunk: tokens whose logits are held at a time.
        num_items: what the sum is divided by; None: the counted tokens. With gradient accumulation: those of all
            micro-batches, so that the gradients add up to the big batch's.

    Raises:
        OptionError: `chunk` is not positive.
        DataError: there is no label, or none is counted and `num_items` is not given.
        UnsupportedModelError: the model's body cannot be told from its head.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()
        >>> ids = torch.arange(10)[None]
        >>> loss = causal_loss(model, {"input_ids": ids, "labels": ids}, chunk=4)
        >>> torch.allclose(loss, model(input_ids=ids, labels=ids).loss)
        True
    """
    targets = inputs.get("shift_labels")
    if targets is None:
        targets = functional.pad(_labels(inputs), (0, 1), value=IGNORED)[:, 1:]
    return _loss(model, inputs, targets, chunk, num_items)


def masked_loss(model: Any, inputs: dict[str, Any], *, chunk: int, num_items: Tensor | int | None = None) -> Tensor:
    """Return the loss of a masked language model: as `causal_loss`, each label being its own token's.

    The head runs on the tokens that are to be guessed alone.

    Args:
        model: an encoder with a masked language modelling head, possibly wrapped.
        inputs: arguments of its forward, with `labels` [B, L]; -100 is not counted.
        chunk: tokens whose logits are held at a time.
        num_items: what the sum is divided by; None: the counted tokens.

    Raises:
        OptionError, DataError, UnsupportedModelError: as `causal_loss`.
    """
    return _loss(model, inputs, _labels(inputs), chunk, num_items)


def _labels(inputs: dict[str, Any]) -> Tensor:
    labels = inputs.get("labels")
    if labels is None:
        raise DataError(f"a loss needs labels, got {', '.join(sorted(inputs))}: give labels, [B, L] token ids or -100.")
    return labels


def _loss(model: Any, inputs: dict[str, Any], targets: Tensor, chunk: int, num_items: Tensor | int | None) -> Tensor:
    given = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
    counted = targets.flatten() != IGNORED  # [B * L]
    wanted = targets.flatten()[counted]  # [N]
    if num_items is None and not len(wanted):
        raise DataError("no token of this batch is counted: its labels are all -100. Give text to predict.")

    def use(apart: Apart) -> Tensor:
        states = apart.states

        def chunk_loss(some: Tensor, where: slice) -> Tensor:
            return summed_cross_entropy(apart.head(some).float(), wanted[where].to(some.device))

        total = sum_in_chunks(chunk_loss, states.flatten(0, 1)[counted.to(states.device)], chunk)
        return total / (len(wanted) if num_items is None else _on(num_items, total))

    return run_apart(model, given, use)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of `logits` [C, V], float32, at `targets` [C].

    On a GPU liger-kernel computes it where it is installed: loss and gradient in one pass, in the memory of the logits.
    """
    if logits.is_cuda and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_cross_entropy

        fused: Tensor = liger_cross_entropy(logits, targets, reduction="sum")
        return fused
    return functional.cross_entropy(logits, targets, reduction="sum")


def _on(number: Tensor | int, other: Tensor) -> Tensor | int:
    return number.to(other.device) if isinstance(number, Tensor) else number


def sum_in_chunks(loss: ChunkLoss, states: Tensor, chunk: int) -> Tensor:
    """Return the sum of `loss` over `states`, float32, a chunk at a time; its gradients are taken along with it.

    Args:
        loss: of a chunk; it may use any parameters.
        states: [N, E].
        chunk: states that are used at a time.

    Raises:
        OptionError: `chunk` is not positive.

    Example:
        >>> states = torch.arange(6.0).view(3, 2).requires_grad_()
        >>> sum_in_chunks(lambda some, where: (some**2).sum(), states, 2).backward()
        >>> states.grad.flatten().tolist()
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if chunk < 1:
        raise OptionError(f"chunk is a whole number of at least 1 token, got {chunk!r}.")
    if not len(states):  # a process whose share of the batch counts nothing
        return states.float().sum()
    if not torch.is_grad_enabled():
        parts = [loss(states[start : start + chunk], slice(start, start + chunk)) for start in _starts(states, chunk)]
        return torch.stack([part.float() for part in parts]).sum()
    parameters = _parameters_of(loss(states[:1].detach(), slice(0, 1)))
    total: Tensor = _SumInChunks.apply(loss, states, chunk, *parameters)
    return total


def _starts(states: Tensor, chunk: int) -> range:
    return range(0, len(states), chunk)


def _parameters_of(value: Tensor) -> list[Tensor]:
    """Return the leaves that `value` has a gradient for, each once, in a fixed order."""
    found: dict[int, Tensor] = {}
    open_nodes, seen = [value.grad_fn], set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.setdefault(id(leaf), leaf)
        open_nodes += [following for following, _ in node.next_functions]
    return list(found.values())


class _SumInChunks(torch.autograd.Function):
    """The sum of a loss over chunks, whose gradients are computed in the forward, one chunk's graph at a time."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkLoss, states: Tensor, chunk: int, *parameters: Tensor) -> Tensor:
        total = torch.zeros((), device=states.device)
        wanted = states.requires_grad
        along = torch.empty_like(states) if wanted else None  # [N, E]
        # many chunks are added up: in float32 they lose nothing
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        for start in _starts(states, chunk):
            where = slice(start, start + chunk)
            some = states[where].detach().requires_grad_(wanted)
            with torch.enable_grad():
                part = loss(some, where)
            inputs = [*([some] if wanted else []), *parameters]
            gradients = list(torch.autograd.grad(part, inputs)) if inputs else []
            if along is not None:
                along[where] = gradients.pop(0)
            for held, gradient in zip(sums, gradients, strict=True):
                held += gradient
            total += part.detach()
        ctx.save_for_backward(*([along] if along is not None else []), *sums)
        ctx.has_states, ctx.dtypes = wanted, [p.dtype for p in parameters]
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        held = list(ctx.saved_tensors)
        along = held.pop(0) if ctx.has_states else None
        scaled = None if along is None else along * outer[0].to(along.dtype)
        return None, scaled, None, *((g * outer[0]).to(dtype) for g, dtype in zip(held, ctx.dtypes, strict=True))
