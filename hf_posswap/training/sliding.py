"""The unswapped model's states for each token of a long text, from windows of its length that overlap by half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import DataError
from hf_posswap.training.head import BodyAndHead, chosen, split


@dataclass(frozen=True)
class Windows:
    """The windows in which a teacher reads some tokens of a batch, [B, L].

    Attributes:
        rows: batch row of each window, int64 [M].
        starts: index in it at which the window begins, int64 [M].
        width: tokens of a window that must be read.
        of_token: window of each token, int64 [N].
        at: index of each token in its window, int64 [N].
    """

    rows: Tensor
    starts: Tensor
    width: int
    of_token: Tensor
    at: Tensor

    def tokens(self, ids: Tensor) -> Tensor:
        """Return the tokens of each window, [M, width], of `ids` [B, L]; past the end the row's last token repeats."""
        indices = self.starts[:, None] + torch.arange(self.width, device=ids.device)  # [M, width]
        return ids[self.rows[:, None], indices.clamp_max(ids.shape[1] - 1)]


def windows_of(wanted: Tensor, begins: Tensor, size: int) -> Windows:
    """Return the windows of `size` tokens that cover the tokens of `wanted`, without unused windows.

    A document's first window gives all its tokens. Every later window starts half a window further and gives its last
    half, so that every token beyond the first window has at least half a window of context. This is sliding-window
    evaluation, https://huggingface.co/docs/transformers/perplexity, with a stride of half a window.

    Args:
        wanted: which tokens, bool [B, L].
        begins: index at which the document of each token begins, int64 [B, L].
        size: tokens of a window, at least 2.

    Example:
        >>> wanted = torch.ones(1, 9, dtype=torch.bool)
        >>> windows = windows_of(wanted, torch.zeros(1, 9, dtype=torch.long), size=4)
        >>> windows.starts.tolist(), windows.of_token.tolist(), windows.at.tolist()
        ([0, 2, 4, 6], [0, 0, 0, 0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 2, 3, 2, 3, 2])
    """
    length, stride = wanted.shape[1], size // 2
    row, index = wanted.nonzero(as_tuple=True)  # [N]
    document = begins[wanted]
    offset = index - document
    start = document + stride * ((offset - size).div(stride, rounding_mode="floor") + 1).clamp_min(0)
    unique_starts, of_token = torch.unique(row * length + start, return_inverse=True)
    at = index - start
    width = int(at.max()) + 1 if len(at) else 0
    return Windows(unique_starts // length, unique_starts % length, width, of_token, at)


def sliding_states(
    teacher: Any, inputs: dict[str, Any], wanted: Tensor, size: int, *, hidden: bool = False
) -> BodyAndHead:
    """Return the teacher's states for the tokens of `wanted`, [N, E] each, and its head, from half-overlapping windows.

    Each window starts at position 0, with no context before it. A forward reads no more tokens than `inputs` has.

    Args:
        teacher: a causal model whose window has `size` tokens.
        inputs: arguments of the forward of the model that learns: `input_ids` [B, L]; rows may end in padding. Packed
            documents are separated by a mask [B, 1, L, L] or, without a mask, by `position_ids`; each is read alone.
        wanted: which tokens, bool [B, L].
        size: tokens of a window.
        hidden: whether to return the states after each layer too.

    Raises:
        DataError: padding stands before text, or `document_begins` cannot read the mask.
        UnsupportedModelError: as `split`.
    """
    ids = inputs["input_ids"]
    if not wanted.any():  # a process whose share of the batch has no labels
        return chosen(split(teacher, {"input_ids": ids[:1, :1]}, hidden=hidden), wanted[:1, :1])
    windows = windows_of(wanted, document_begins(inputs), size)
    rows = windows.tokens(ids)  # [M, width]
    at_once = max(1, ids.numel() // windows.width)
    outputs: tuple[Tensor, ...] = ()
    with torch.no_grad():
        for first in range(0, len(rows), at_once):
            apart = split(teacher, {"input_ids": rows[first : first + at_once]}, hidden=hidden)
            in_batch = (windows.of_token >= first) & (windows.of_token < first + at_once)
            batch_states = (apart.states, *apart.hidden)  # [.., width, E] each
            outputs = outputs or tuple(states.new_empty(len(in_batch), states.shape[-1]) for states in batch_states)
            for output, states in zip(outputs, batch_states, strict=True):
                output[in_batch] = states[windows.of_token[in_batch] - first, windows.at[in_batch]]
    return BodyAndHead(outputs[0], apart.head, outputs[1:])


def document_begins(inputs: dict[str, Any]) -> Tensor:
    """Return the index at which the document of each token begins, int64 [B, L].

    Args:
        inputs: `input_ids` [B, L]; documents are separated by a mask [B, 1, L, L] or, without a mask, by
            `position_ids` that restart with each document. With a mask [B, L], a row is one document.

    Raises:
        DataError: a mask [B, L] has padding before text, or a mask [B, 1, L, L] is not causal within documents.

    Example:
        >>> ids, mask = torch.arange(4)[None], torch.block_diag(torch.ones(3, 3).tril(), torch.ones(1, 1)).bool()
        >>> document_begins({"input_ids": ids, "attention_mask": mask[None, None]}).tolist()
        [[0, 0, 0, 3]]
    """
    ids, mask, positions = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
    index = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if mask is not None:
        if getattr(mask, "ndim", None) == 4:
            return _begins_of_mask(mask).expand(ids.shape)
        if getattr(mask, "ndim", None) != 2:
            raise DataError(
                f"a teacher reads a mask [B, L] or [B, 1, L, L], got {getattr(mask, 'shape', type(mask).__name__)}."
            )
        if bool((mask.diff(dim=1) > 0).any()):
            raise DataError(
                "a teacher that reads by sliding windows needs padding at the end of rows, and this batch has padding "
                "before text: pad on the right."
            )
    if mask is not None or positions is None:
        return torch.zeros_like(index)
    first = functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)  # [B, L]
    return torch.where(first, index, 0).cummax(dim=1).values


def _begins_of_mask(mask: Tensor) -> Tensor:
    """Return the index at which the document of each token begins, [B, L]; a fully masked token is its own document."""
    seen = mask if mask.dtype == torch.bool else mask == 0  # [B, H, Q, K]
    index = torch.arange(mask.shape[-1], device=mask.device)
    head_mask = seen[:, 0]
    any_seen = head_mask.any(dim=-1)  # [B, Q]
    if mask.shape[-2] == mask.shape[-1]:
        begins = torch.where(any_seen, head_mask.int().argmax(dim=-1), index)
        expected = (index >= begins[..., None]) & (index <= index[:, None]) & any_seen[..., None]
        # same document as the previous token, or a new one
        is_valid_begin = (begins[:, 1:] == begins[:, :-1]) | (begins[:, 1:] == index[1:])
        if bool((seen == expected[:, None]).all()) and bool(is_valid_begin.all()):
            return begins
    raise DataError(
        f"a teacher reads documents from their beginning, and this attention mask {tuple(mask.shape)} is not causal "
        "within whole documents: give a mask [B, 1, L, L] that is, True or 0 where a token is seen, or position_ids "
        "without a mask."
    )
