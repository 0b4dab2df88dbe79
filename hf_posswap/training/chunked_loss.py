"""Losses that materialize the logits of one chunk of tokens at a time, never [L, V], in forward and backward.

`chunking_problem` tests on the model itself that they equal the model's own loss.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import DataError, OptionError, UnsupportedModelError
from hf_posswap.training.head import BodyAndHead, inner_model, run_body_and_head, without_cache
from hf_posswap.utils.devices import evaluating

if TYPE_CHECKING:
    from torch import nn
    from torch.autograd.function import FunctionCtx
    from transformers import PreTrainedModel

    class _Context(FunctionCtx):
        """What the forward keeps for the backward."""

        saved_tensors: tuple[Tensor, ...]
        has_states: bool
        dtypes: list[torch.dtype]


IGNORED = -100
ChunkLoss = Callable[[Tensor, slice], Tensor]
"""From a chunk of states [C, E], and its slice of all states, to the sum of its tokens' losses."""
_TOKENS = 64
_PARAMETERS = 24  # whose gradients are compared
_LARGEST = 1 << 27  # elements of one of them


def causal_loss(
    model: nn.Module, inputs: dict[str, Any], *, chunk: int, num_items: Tensor | int | None = None
) -> Tensor:
    """Return the next-token loss of a causal model, a scalar with a gradient, equal to `model(**inputs).loss`.

    The body runs once. The head then runs on `chunk` tokens at a time and computes their gradients directly, as in
    https://arxiv.org/abs/2410.10989, section 3.2, so that neither forward nor backward holds all logits.

    Args:
        model: a causal model, or a PEFT, DDP or FSDP2 wrapper around one.
        inputs: arguments of its forward, with `labels` [B, L], or already shifted `shift_labels` [B, L]; -100 is
            ignored.
        chunk: tokens whose logits are held at a time.
        num_items: divisor of the sum; None: the counted tokens. With gradient accumulation, the counted tokens of all
            micro-batches, so that the gradients add up to those of the whole batch.

    Raises:
        OptionError: `chunk` is not positive.
        DataError: there are no labels, or all are -100 and `num_items` is not given.
        UnsupportedModelError: the model's body cannot be separated from its head.

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


def masked_loss(
    model: PreTrainedModel, inputs: dict[str, object], *, chunk: int, num_items: Tensor | int | None = None
) -> Tensor:
    """Return the loss of a masked language model, as `causal_loss` but without shifting the labels.

    The head runs only on the masked tokens.

    Args:
        model: an encoder with a masked language modelling head, possibly wrapped.
        inputs: arguments of its forward, with `labels` [B, L]; -100 is ignored.
        chunk: tokens whose logits are held at a time.
        num_items: divisor of the sum; None: the counted tokens.

    Raises:
        OptionError, DataError, UnsupportedModelError: as `causal_loss`.
    """
    return _loss(model, inputs, _labels(inputs), chunk, num_items)


def _labels(inputs: dict[str, Any]) -> Tensor:
    labels = inputs.get("labels")
    if labels is None:
        raise DataError(f"a loss needs labels, got {', '.join(sorted(inputs))}: give labels, [B, L] token ids or -100.")
    return labels


def _loss(
    model: nn.Module, inputs: dict[str, object], targets: Tensor, chunk: int, num_items: Tensor | int | None
) -> Tensor:
    model_inputs = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
    counted = targets.flatten() != IGNORED  # [B * L]
    chosen_targets = targets.flatten()[counted]  # [N]
    if num_items is None and not len(chosen_targets):
        raise DataError("no token of this batch is counted: its labels are all -100. Give text to predict.")

    def use(apart: BodyAndHead) -> Tensor:
        states = apart.states

        def chunk_loss(chunk_states: Tensor, span: slice) -> Tensor:
            return summed_cross_entropy(apart.head(chunk_states).float(), chosen_targets[span].to(chunk_states.device))

        total = sum_in_chunks(chunk_loss, states.flatten(0, 1)[counted.to(states.device)], chunk)
        count = len(chosen_targets) if num_items is None else num_items
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    return run_body_and_head(model, model_inputs, use)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of `logits` [C, V], float32, at `targets` [C].

    On a GPU, an installed liger-kernel computes it: loss and gradient in one pass, in the memory of the logits.
    """
    if logits.is_cuda and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_cross_entropy

        fused: Tensor = liger_cross_entropy(logits, targets, reduction="sum")
        return fused
    return functional.cross_entropy(logits, targets, reduction="sum")


def sum_in_chunks(loss: ChunkLoss, states: Tensor, chunk: int) -> Tensor:
    """Return the sum of `loss` over `states`, float32, a chunk at a time; its gradients are computed in the forward.

    Args:
        loss: of a chunk; it may use any parameters.
        states: [N, E].
        chunk: states per call of `loss`.

    Raises:
        OptionError: `chunk` is not positive.

    Example:
        >>> states = torch.arange(6.0).view(3, 2).requires_grad_()
        >>> sum_in_chunks(lambda chunk, span: (chunk**2).sum(), states, 2).backward()
        >>> states.grad.flatten().tolist()
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if chunk < 1:
        raise OptionError(f"chunk is a whole number of at least 1 token, got {chunk!r}.")
    if not len(states):  # a process whose share of the batch has no labels
        return states.float().sum()
    if not torch.is_grad_enabled():
        losses = [loss(states[start : start + chunk], slice(start, start + chunk)) for start in _starts(states, chunk)]
        return torch.stack([loss_value.float() for loss_value in losses]).sum()
    parameters = _parameters_of(loss(states[:1].detach(), slice(0, 1)))
    total: Tensor = _SumInChunks.apply(loss, states, chunk, *parameters)
    return total


def _starts(states: Tensor, chunk: int) -> range:
    return range(0, len(states), chunk)


def _parameters_of(value: Tensor) -> list[Tensor]:
    """Return the leaves that `value` depends on, each once, in a fixed order."""
    leaves: dict[int, Tensor] = {}
    open_nodes, seen = [value.grad_fn], set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.setdefault(id(leaf), leaf)
        open_nodes += [following for following, _ in node.next_functions]
    return list(leaves.values())


class _SumInChunks(torch.autograd.Function):
    """The sum of a loss over chunks, whose gradients are computed in the forward, one chunk's graph at a time."""

    @staticmethod
    def forward(ctx: _Context, loss: ChunkLoss, states: Tensor, chunk: int, *parameters: Tensor) -> Tensor:
        total = torch.zeros((), device=states.device)
        needs_grad = states.requires_grad
        states_grad = torch.empty_like(states) if needs_grad else None  # [N, E]
        # many chunks are added up: float32 keeps the precision
        parameter_sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        for start in _starts(states, chunk):
            span = slice(start, start + chunk)
            chunk_states = states[span].detach().requires_grad_(needs_grad)
            with torch.enable_grad():
                chunk_loss = loss(chunk_states, span)
            inputs = [*([chunk_states] if needs_grad else []), *parameters]
            gradients = list(torch.autograd.grad(chunk_loss, inputs)) if inputs else []
            if states_grad is not None:
                states_grad[span] = gradients.pop(0)
            for parameter_sum, gradient in zip(parameter_sums, gradients, strict=True):
                parameter_sum += gradient
            total += chunk_loss.detach()
        ctx.save_for_backward(*([states_grad] if states_grad is not None else []), *parameter_sums)
        ctx.has_states, ctx.dtypes = needs_grad, [p.dtype for p in parameters]
        return total

    @staticmethod
    def backward(ctx: _Context, *outer: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        states_grad = saved.pop(0) if ctx.has_states else None
        scaled = None if states_grad is None else states_grad * outer[0].to(states_grad.dtype)
        return None, scaled, None, *((g * outer[0]).to(dtype) for g, dtype in zip(saved, ctx.dtypes, strict=True))


def chunking_problem(model: PreTrainedModel, inputs: dict[str, object], *, chunk: int, causal: bool) -> str | None:
    """Return how the chunked loss differs from this model's own loss, or None if loss and gradients are equal.

    Runs both on a few tokens of `inputs`, without dropout and without touching stored gradients: once, before a run.

    Args:
        model: with or without a PEFT adapter, not yet wrapped for several processes.
        inputs: a batch with `labels`.
        chunk: chunk size of the run; at most a quarter of the tokens is used here, so that there are several chunks.
        causal: whether the model predicts the next token.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> ids = torch.arange(10)[None]
        >>> chunking_problem(model, {"input_ids": ids, "labels": ids}, chunk=64, causal=True)
    """
    try:
        inner = inner_model(model)
    except UnsupportedModelError as error:
        return str(error)
    batch = _few_tokens(inputs, inner.device)
    loss = causal_loss if causal else masked_loss
    # up to 24 trained ones, half from the start and half from the end, so that the head is included
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() <= _LARGEST}
    names = list(trained)
    half = _PARAMETERS // 2
    chosen = names if len(names) <= _PARAMETERS else [*names[:half], *names[-half:]]
    parameters = {name: trained[name] for name in chosen}
    try:
        with evaluating(model):
            model_loss = model(**batch | without_cache(inner)).loss
            chunked_loss = loss(model, batch, chunk=max(1, min(chunk, batch["input_ids"].numel() // 4)))
            actual, expected = chunked_loss.detach().float(), model_loss.detach().float()
            difference = float((actual - expected).norm() / expected.norm().clamp_min(1e-6))
            if not difference <= _tolerance(inner):
                return f"{type(inner).__name__} has a loss of {model_loss:.6g}, and {chunked_loss:.6g} in chunks"
            gradients = [
                torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
                for value in (model_loss, chunked_loss)
            ]
    except UnsupportedModelError as error:
        return str(error)
    parameter = _differing_gradient(list(parameters), *gradients, tolerance=10 * _tolerance(inner))
    return parameter and f"{type(inner).__name__} in chunks gives {parameter} a different gradient than its own loss"


def _differing_gradient(
    names: list[str],
    model_gradients: tuple[Tensor | None, ...],
    chunked_gradients: tuple[Tensor | None, ...],
    *,
    tolerance: float,
) -> str | None:
    """Return the name of a parameter whose gradients differ by more than noise, or None."""
    largest = max((float(gradient.float().norm()) for gradient in model_gradients if gradient is not None), default=0.0)
    for name, expected, actual in zip(names, model_gradients, chunked_gradients, strict=True):
        if (expected is None) != (actual is None):
            return name
        if expected is not None and actual is not None:
            difference = float((expected.float() - actual.float()).norm())
            if not difference <= tolerance * (float(expected.float().norm()) + 0.01 * largest):
                return name
    return None


def _few_tokens(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the first tokens of the row with the most labels among them."""
    labels = inputs["labels"]
    row = int((labels[:, :_TOKENS] != IGNORED).sum(-1).argmax())
    batch = {}
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            batch[name] = value
        elif value.ndim == 4:  # a mask of packed documents
            batch[name] = value[row : row + 1, :, :_TOKENS, :_TOKENS].to(device)
        else:
            batch[name] = value[row : row + 1, :_TOKENS].to(device)
    return batch


def _tolerance(inner: PreTrainedModel) -> float:
    return 1e-4 if inner.dtype == torch.float32 else 1e-2
