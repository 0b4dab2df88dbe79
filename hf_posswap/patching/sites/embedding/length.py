"""The guard that raises PositionRangeError beyond the end of a position table, or grows buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.compat.transformers_calls import find_cache, is_paged_cache
from hf_posswap.errors import PositionRangeError
from hf_posswap.families.modules import by_name, entry_signature
from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.edits.restore import keep_hooks, remove_hooks, replace_buffer, restore_buffers
from hf_posswap.patching.edits.settings import grow_buffer, grown


class LengthHook:
    """Pre-hook of the module that takes the input: grows buffers to the length, or raises beyond the table's end.

    Args:
        model_name: for the message.
        capacity: positions of the table; None: there is none.
        offset: rows of the table and the buffers before position 0.
        first: the value of the model's `position_ids` for position 0.
        buffers: names, below the module, of buffers [1, P] with one entry a position; they grow as needed.
        signature: names of the module's positional arguments.
    """

    def __init__(
        self,
        model_name: str,
        capacity: int | None,
        offset: int,
        first: int,
        buffers: tuple[str, ...],
        signature: list[str],
    ) -> None:
        self.model_name, self.capacity, self.offset, self.first = model_name, capacity, offset, first
        self.buffers, self.signature = buffers, signature

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = by_name(self.signature, args, kwargs)
        cache_argument = find_cache(args, kwargs)
        length = _tokens(given) + _past(None if cache_argument is None else cache_argument[1])
        position_ids = given.get("position_ids")
        if position_ids is not None and not torch.compiler.is_compiling():
            if (
                position_ids.device.type == "cpu" or self.buffers
            ):  # on other devices, reading it synchronizes with the host
                length = max(length, int(position_ids.max()) + 1 - self.first)
        if self.capacity is None:
            for name in self.buffers:
                grow_buffer(module, name, length + self.offset)
            return
        if length > self.capacity:
            raise PositionRangeError(
                f"{self.model_name} was asked for {length} positions, but its position table ends at {self.capacity}. "
                f"Extend the table when patching: patch_model(model, ..., max_length={length}), or swap to a scheme "
                "without a table."
            )


def _tokens(given: dict[str, Any]) -> int:
    """Return L of the input ids [..., L] or embeddings [..., L, E] among the arguments; 0 if there are none."""
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if ids is not None:
        return ids.shape[-1]
    return 0 if embeddings is None else embeddings.shape[-2]


def _past(cache: Any) -> int:
    if cache is None or is_paged_cache(cache):  # it holds many texts
        return 0
    past = cache.get_seq_length()
    if isinstance(past, Tensor):  # a static cache has a fixed end
        return 0 if torch.compiler.is_compiling() or past.device.type != "cpu" else int(past)
    return past


def _grown(name: str, length: int, _: nn.Module, old: Tensor) -> Tensor:
    return grown(name, old, length)


@dataclass(frozen=True, kw_only=True)
class GuardLength(Edit):
    """Makes the model raise beyond the end of its table, or grow its buffers if it has no end.

    Attributes:
        entry: path of the module that takes the input.
        capacity: positions of the table; None: there is none.
        offset: rows of the table and of the buffers before position 0.
        first: the value of the model's `position_ids` for position 0.
        buffers: paths of buffers with one entry a position; they grow as needed.
        length: positions for which the buffers have room from the start.
    """

    entry: str
    capacity: int | None
    offset: int
    first: int
    buffers: tuple[str, ...]
    length: int

    def apply(self, model: Any, saved: Saved) -> None:
        length = self.length + self.offset
        for path in self.buffers:
            replace_buffer(model, path, partial(_grown, path.rpartition(".")[2], length), saved)
        self._watch(model, saved)

    def _watch(self, model: Any, saved: Saved) -> None:
        entry = model.get_submodule(self.entry)
        below = tuple(path.removeprefix(self.entry).lstrip(".") for path in self.buffers)
        hook = LengthHook(type(model).__name__, self.capacity, self.offset, self.first, below, entry_signature(entry))
        keep_hooks(saved, entry.register_forward_pre_hook(hook, with_kwargs=True))

    def undo(self, model: Any, saved: Saved) -> None:
        remove_hooks(saved)
        restore_buffers(model, saved)

    def check(self, model: Any) -> str | None:
        hooks = pre_hooks(model.get_submodule(self.entry))
        watched = any(isinstance(hook, LengthHook) for hook in hooks)
        return None if watched else "the hook that watches the length is gone"

    def reload(self, model: Any) -> None:
        self.apply(model, {})

    @property
    def touches(self) -> tuple[str, ...]:
        return ()
