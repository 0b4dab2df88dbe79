"""The embedding site: the additive position table, replaced or taken away, and the guard at its end."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.errors import PositionRangeError

SENTINEL_SHAPE = (1,)


class NoPositions(nn.Module):
    """Stands where a position table was, and adds nothing, whatever it is called with.

    Its buffer `weight` keeps the table's place in the state dict: zeros of the table's shape where stock transformers
    can then run the checkpoint as it is, or one lone zero where it cannot, so that the native class fails to load it
    with a size mismatch instead of inventing a random table. A table that is computed has no such place.

    Args:
        weight: zeros, [P, E] or [1].
        saved: whether it is in the state dict; if not, nobody fills it when the model is loaded, and nothing reads it.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, *, saved: bool = True) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=saved)

    @property
    def is_empty(self) -> bool:
        """Whether nothing but zeros stands for the table."""
        if self.weight.is_meta or "weight" in self._non_persistent_buffers_set:
            return True
        return not bool(self.weight.any())

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return a zero without dimensions: it broadcasts, promotes no dtype, and on the CPU it meets any device."""
        return self.weight.new_zeros((), device="cpu" if self.weight.is_meta else None)  # on meta: it is offloaded

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}"


class BlendedTable(nn.Module):
    """Stands where a position table was, and gives its rows in the share 1 - w, a new table's in the share w.

    The old table lies under `old` in the state dict, the new one under `new`; one lone zero under `weight` makes the
    native class fail to load it with a size mismatch, instead of taking the old table as it is.

    Args:
        native: the table's module; its own forward does the look-up.
        new: rows of the new table from position 0 on, [P, E], a parameter where they are trained; None: there is none.
        share: w, in [0, 1].
        offset: rows of the old table before position 0.
    """

    native: nn.Embedding
    weight: Tensor
    new: Tensor | None

    def __init__(self, native: nn.Embedding, new: Tensor | None, share: float, offset: int) -> None:
        super().__init__()
        self.__dict__["native"] = native  # not a child: its weight is `old`
        self.old, self.share, self.offset = native.weight, share, offset
        self.register_buffer("weight", native.weight.new_zeros(SENTINEL_SHAPE).detach())
        if isinstance(new, nn.Parameter):
            self.new = new
        else:
            self.register_buffer("new", new)

    def blended(self) -> Tensor:
        """Return the rows that are in force, [offset + P, E]."""
        if self.share == 0:
            return self.old
        old = (1 - self.share) * self.old
        if self.new is None:
            return old
        return torch.cat((self.old[: self.offset], old[self.offset :] + self.share * self.new))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the table's own module returns for these arguments, of the blended rows."""
        return torch.func.functional_call(self.native, {"weight": self.blended()}, args, kwargs)

    def extra_repr(self) -> str:
        return f"share={self.share:g}"


class LengthHook:
    """Pre-hook of the module that takes the input: makes room for the length, or says that the table ends.

    Args:
        model_name: for the message.
        capacity: positions of the table; None where there is none.
        offset: rows of the table and the buffers before position 0.
        first: what the model's `position_ids` call position 0.
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
        given = dict(zip(self.signature, args, strict=False)) | kwargs
        length = _tokens(given) + _past(given.get("past_key_values"))
        position_ids = given.get("position_ids")
        if position_ids is not None and not torch.compiler.is_compiling():
            if position_ids.device.type == "cpu" or self.buffers:  # elsewhere reading it makes the host wait
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


def entry_signature(module: nn.Module) -> list[str]:
    """Return the names of the positional arguments of `module`."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def replace_weight(embedding: nn.Embedding, rows: Tensor, *, trainable: bool) -> None:
    """Give `embedding` a new weight [P, E] of its old dtype and device; a view of a formula is frozen."""
    old = embedding.weight
    embedding.weight = nn.Parameter(rows.to(device=old.device, dtype=old.dtype), requires_grad=trainable)
    embedding.num_embeddings = rows.shape[0]


def _tokens(given: dict[str, Any]) -> int:
    """Return L of the input ids [..., L] or embeddings [..., L, E] among the arguments; 0 where there are none."""
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if ids is not None:
        return ids.shape[-1]
    return 0 if embeddings is None else embeddings.shape[-2]


def _past(cache: Any) -> int:
    if cache is None:
        return 0
    past = cache.get_seq_length()
    if isinstance(past, Tensor):  # a static cache knows its own end
        return 0 if torch.compiler.is_compiling() or past.device.type != "cpu" else int(past)
    return past


def is_mask(buffer: Tensor) -> bool:
    """Return whether a buffer has an entry for each pair of positions, [..., P, P] with P > 1."""
    return buffer.dim() > 1 and buffer.shape[-1] == buffer.shape[-2] > 1


def grown_mask(owner: Any, old: Tensor, length: int) -> Tensor:
    """Return the causal mask `old` [..., P, P] of the attention module `owner` for another length, on its device.

    Where its last row does not see all keys, it shows the window; a longer window only the module's config knows.
    """
    full = torch.ones((*old.shape[:-2], length, length), dtype=torch.bool, device=old.device).tril()
    window = None
    if not old.is_meta and not old[..., -1, :].all():
        window = int(old.reshape(-1, old.shape[-1])[-1].sum())
    elif getattr(owner, "attention_type", None) == "local":
        window = owner.config.window_size
    return (full if window is None else full & ~full.tril(-window)).to(old.dtype)


def grow_buffer(root: nn.Module, path: str, length: int) -> None:
    """Make the buffer [1, P] or [P] at `path` at least `length` long: position ids go on counting, others are zeros."""
    owner_path, _, leaf = path.rpartition(".")
    owner = root.get_submodule(owner_path)
    old = getattr(owner, leaf)
    if old.shape[-1] >= length:
        return
    if leaf == "position_ids":
        new = torch.arange(length, dtype=old.dtype, device=old.device).expand((*old.shape[:-1], -1))
    else:
        new = torch.zeros((1, length), dtype=old.dtype, device=old.device)
    setattr(owner, leaf, new)
