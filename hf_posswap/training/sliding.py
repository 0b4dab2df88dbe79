"""What the unswapped model knows of each token of a long text, from windows of its own length that overlap by half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import DataError
from hf_posswap.training.head import Apart, chosen, split


@dataclass(frozen=True)
class Windows:
    """The windows in which a teacher reads some tokens of a batch, [B, L].

    Attributes:
        rows: row of each window, int64 [M].
        starts: index in it at which the window begins, int64 [M].
        width: tokens of a window that have to be read.
        of_token: window of each token, int64 [N].
        at: index of each token in its window, int64 [N].
    """

    rows: Tensor
    starts: Tensor
    width: int
    of_token: Tensor
    at: Tensor

    def tokens(self, ids: Tensor) -> Tensor:
        """Return the tokens of each window, [M, width], of `ids` [B, L]; past the end the row's last one stands."""
        places = self.starts[:, None] + torch.arange(self.width, device=ids.device)  # [M, width]
        return ids[self.rows[:, None], places.clamp_max(ids.shape[1] - 1)]


def windows_of(wanted: Tensor, begins: Tensor, size: int) -> Windows:
    """Return the windows of `size` tokens in which the tokens of `wanted` are read, none that no token needs.

    A document's first window gives all its tokens. Every later one begins half a window after the one before and gives
    its last half, so that every token beyond the first window has at least half a window before it: the evaluation
    by a sliding window, https://huggingface.co/docs/transformers/perplexity, with a stride of half a window.

    Args:
        wanted: which tokens, bool [B, L].
        begins: index at which the document of each token begins, int64 [B, L].
        size: tokens of a window, at least 2.

    Example:
        >>> wanted = torch.ones(1, 9, dtype=torch.bool)
        >>> found = windows_of(wanted, torch.zeros(1, 9, dtype=torch.long), size=4)
        >>> found.starts.tolist(), found.of_token.tolist(), found.at.tolist()
        ([0, 2, 4, 6], [0, 0, 0, 0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 2, 3, 2, 3, 2])
    """
    length, stride = wanted.shape[1], size // 2
    row, index = wanted.nonzero(as_tuple=True)  # [N]
    document = begins[wanted]
    inside = index - document
    start = document + stride * ((inside - size).div(stride, rounding_mode="floor") + 1).clamp_min(0)
    found, of_token = torch.unique(row * length + start, return_inverse=True)
    at = index - start
    width = int(at.max()) + 1 if len(at) else 0
    return Windows(found // length, found % length, width, of_token, at)


def sliding_states(teacher: Any, inputs: dict[str, Any], wanted: Tensor, size: int, *, hidden: bool = False) -> Apart:
    """Return the teacher's states of the tokens of `wanted`, [N, E] each, and its head: from half-overlapping windows.

    Each window begins at position 0, with nothing before it. No more tokens are read at once than `inputs` has.

    Args:
        teacher: a causal model whose window has `size` tokens.
        inputs: arguments of the forward of the model that learns: `input_ids` [B, L]; rows may end in padding. Packed
            documents begin where a mask [B, 1, L, L] or, without any mask, `position_ids` say so; each is read by
            itself.
        wanted: which tokens, bool [B, L].
        size: tokens of a window.
        hidden: whether the states after each layer are wanted, too.

    Raises:
        DataError: padding stands before text, or `document_begins` cannot read the mask.
        UnsupportedModelError: as `split`.
    """
    ids = inputs["input_ids"]
    if not wanted.any():  # a process whose share of the batch counts nothing
        return chosen(split(teacher, {"input_ids": ids[:1, :1]}, hidden=hidden), wanted[:1, :1])
    windows = windows_of(wanted, document_begins(inputs), size)
    rows = windows.tokens(ids)  # [M, width]
    at_once = max(1, ids.numel() // windows.width)
    known: tuple[Tensor, ...] = ()
    with torch.no_grad():
        for first in range(0, len(rows), at_once):
            apart = split(teacher, {"input_ids": rows[first : first + at_once]}, hidden=hidden)
            here = (windows.of_token >= first) & (windows.of_token < first + at_once)
            read = (apart.states, *apart.hidden)  # [.., width, E] each
            known = known or tuple(states.new_empty(len(here), states.shape[-1]) for states in read)
            for kept, states in zip(known, read, strict=True):
                kept[here] = states[windows.of_token[here] - first, windows.at[here]]
    return Apart(known[0], apart.head, known[1:])


def document_begins(inputs: dict[str, Any]) -> Tensor:
    """Return the index at which the document of each token begins, int64 [B, L].

    Args:
        inputs: `input_ids` [B, L]; a mask [B, 1, L, L] says which tokens belong together, or without any mask
            `position_ids`, which begin anew with each document. A mask [B, L] says that a row is one document.

    Raises:
        DataError: padding stands before text in a mask [B, L], or a mask [B, 1, L, L] is not one in which each token
            sees its document up to itself.

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
                "a teacher that reads by sliding windows needs padding at the end of rows, and here some is before "
                "text: pad on the right."
            )
    if mask is not None or positions is None:
        return torch.zeros_like(index)
    first = functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)  # [B, L]
    return torch.where(first, index, 0).cummax(dim=1).values


def _begins_of_mask(mask: Tensor) -> Tensor:
    """Return the index at which the document of each token begins, [B, L]; a token that sees nothing is one itself."""
    seen = mask if mask.dtype == torch.bool else mask == 0  # [B, H, Q, K]
    index = torch.arange(mask.shape[-1], device=mask.device)
    one = seen[:, 0]
    any_seen = one.any(dim=-1)  # [B, Q]
    if mask.shape[-2] == mask.shape[-1]:
        begins = torch.where(any_seen, one.int().argmax(dim=-1), index)
        whole = (index >= begins[..., None]) & (index <= index[:, None]) & any_seen[..., None]
        begun = (begins[:, 1:] == begins[:, :-1]) | (begins[:, 1:] == index[1:])  # with the one before, or here
        if bool((seen == whole[:, None]).all()) and bool(begun.all()):
            return begins
    raise DataError(
        f"a teacher reads documents from their beginning, and by this attention mask {tuple(mask.shape)} tokens do "
        "not see just their document up to themselves: give a mask [B, 1, L, L] of whole documents, True or 0 where a "
        "token is seen, or position_ids without a mask."
    )
