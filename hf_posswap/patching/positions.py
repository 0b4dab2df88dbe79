"""Where the queries and keys of one attention call stand.

Keys carry no position of their own once they are cached, so positions are found from what transformers promises: the
cache's offsets and the `position_ids` that the model made or was given (which already skip left padding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import PositionShapeError


@dataclass
class Span:
    """The queries and keys of one attention call.

    Attributes:
        query: positions of the queries, [B or 1, Q].
        past: tokens in the cache before this call: an int, or a 0-dim tensor for static caches.
        key_length: K, keys after this call.
        key_offset: index of the first key that is kept (sliding windows drop old ones).
        padding: left padding of each row, [B, 1], or 0: index less position.
        fresh: whether the keys are exactly the tokens of the queries.
        made: what was made of these positions for the layers that stand like this; None: nothing may be shared.
    """

    query: Tensor
    past: int | Tensor
    key_length: int
    key_offset: int | Tensor
    padding: Tensor | int
    fresh: bool
    made: dict[Any, Any] | None = None

    @property
    def key(self) -> Tensor:
        """Positions of the keys, [B or 1, K]."""
        if self.fresh:
            return self.query
        index = torch.arange(self.key_length, device=self.query.device)[None] + self.key_offset  # [1, K]
        return index - self.padding

    @property
    def length(self) -> Tensor:
        """Tokens seen so far in each row, [B or 1, 1, 1, 1]."""
        return self.query.amax(dim=-1)[:, None, None, None] + 1


def find_span(
    hidden: Tensor, position_ids: Tensor | None, cache: Any, layer_idx: int, memo: ForwardMemo, first: int = 0
) -> Span:
    """Return where queries and keys stand: for layers that stand alike, the very same span.

    Args:
        hidden: input of the attention module, [B, Q, E].
        position_ids: [B or 1, Q] as the model made them or the caller gave them; None: counted from the cache.
        cache: the self-attention cache, not yet updated, or None.
        layer_idx: of the attention module.
        memo: shared by the layers.
        first: what `position_ids` call position 0.
    """
    length = hidden.shape[1]
    past: int | Tensor = 0
    key_length, key_offset = length, 0
    if cache is not None:
        past = cache.get_query_offset(layer_idx)
        key_length, key_offset = cache.get_mask_sizes(length, layer_idx)
        if isinstance(past, Tensor):
            past = past.to(hidden.device)
    if isinstance(past, Tensor):
        return _span(hidden, position_ids, past, key_length, key_offset, first, made=None)
    key = (*told_by(position_ids), length, hidden.device, past, key_length, key_offset)
    return memo.shared(key, lambda made: _span(hidden, position_ids, past, key_length, key_offset, first, made))


def _span(
    hidden: Tensor, position_ids: Tensor | None, past: Any, key_length: int, key_offset: Any, first: int, made: Any
) -> Span:
    length = hidden.shape[1]
    fresh = not isinstance(past, Tensor) and past == 0 and key_length == length
    index = torch.arange(length, device=hidden.device)[None] + past  # [1, Q]
    if position_ids is None:
        return Span(index, past, key_length, key_offset, 0, fresh, made)
    position_ids = position_ids - first if first else position_ids
    padding = index[:, -1:] - position_ids[:, -1:]  # [B, 1]
    return Span(position_ids, past, key_length, key_offset, padding, fresh, made)


def told_by(position_ids: Tensor | None) -> tuple[Tensor | None, int | None]:
    """Return a tensor and its version, by which it is known again if nothing was written into it since."""
    if position_ids is None or torch.compiler.is_compiling() or position_ids.is_inference():  # these have no version
        return position_ids, None
    return position_ids, position_ids._version


def check_fits(position_ids: Tensor, given: dict[str, Any]) -> None:
    """Check that `position_ids` are as many as the tokens among the arguments `given` by name.

    Raises:
        PositionShapeError: they are not.
    """
    ids = given.get("input_ids")
    held = given.get("inputs_embeds") if ids is None else ids
    if held is None or tuple(position_ids.shape) in ((1, held.shape[1]), tuple(held.shape[:2])):
        return
    raise PositionShapeError(
        f"position_ids of shape {list(position_ids.shape)} were given for tokens of shape {list(held.shape[:2])}: give "
        "one for each token, or one row for all rows."
    )


def after_padding(given: dict[str, Any], *, only_if_padded: bool) -> Tensor | None:
    """Return positions [B, Q] that skip left padding; None where no mask [B, K] says what is padding.

    Args:
        given: arguments of the module that takes the input, by name.
        only_if_padded: whether None is wanted where no row has left padding, which costs a look at the mask.
    """
    mask, ids, cache = (given.get(name) for name in ("attention_mask", "input_ids", "past_key_values"))
    ids = given.get("inputs_embeds") if ids is None else ids
    if mask is None or ids is None or mask.dim() != 2:
        return None
    padding = (mask.cumsum(dim=-1) == 0).sum(dim=-1, keepdim=True)  # [B, 1]
    if only_if_padded and not bool(padding.any()):
        return None
    past = 0 if cache is None else cache.get_seq_length()
    index = torch.arange(ids.shape[1], device=mask.device)[None] + past  # [1, Q]
    return (index - padding).clamp(min=0)


@dataclass
class ForwardMemo:
    """What the layers of one forward share: where they stand, and what the first of them made of it, as cos and sin.

    A span is found again only by the very tensor and numbers it was made from, so a stale one cannot be used; `clear`
    at the start and end of each forward frees it. While a graph is being traced nothing is kept: the compiler merges
    equal work by itself.
    """

    entries: list[tuple[tuple[Any, ...], Span]] = field(default_factory=list)
    given: Tensor | None = None
    """Position ids [B or 1, Q] that the model was given: not all models tell their attention of them."""
    told: bool = False
    """Whether a caller gave them, in the model's own count; otherwise they count from 0."""
    runs_again: bool = False
    """Whether layers run again in the backward."""
    drops_bias: bool = False
    """Whether the bias that the model itself makes was taken away: what is left of it is zeros."""

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()

    def shared(self, key: tuple[Any, ...], make: Callable[[Any], Span]) -> Span:
        """Return the span that was kept under `key`, compared by identity for tensors, or what `make` gives.

        Args:
            key: what the span is made from.
            make: takes what `Span.made` begins as.
        """
        if torch.compiler.is_compiling():
            return make(None)
        for known, span in self.entries:
            if len(known) == len(key) and all(map(_same, known, key)):
                return span
        span = make({})
        self.entries.append((key, span))
        return span

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardMemo:
        return ForwardMemo(drops_bias=self.drops_bias)

    def __getstate__(self) -> dict[str, Any]:
        return {"entries": [], "given": None, "told": False, "runs_again": False, "drops_bias": self.drops_bias}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return bool(a == b)
