"""The edits of a table of token positions: replaced, blended with another, or removed; and the guard of its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import original_of, trained_copies_of
from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.compat.transformers_calls import find_cache, is_paged_cache
from hf_posswap.compat.transformers_models import mark_initialised, set_unsaved_keys, unsaved_keys
from hf_posswap.errors import PositionRangeError
from hf_posswap.families.modules import by_name, entry_signature, owner_of, replace_everywhere, table_of
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.edit import AppliedAgain, PluginOnly, Saved, TouchesModule, TouchesNothing
from hf_posswap.patching.edits.removed_table import NoPositions, holds, not_rows, not_zero
from hf_posswap.patching.edits.restore import (
    keep_hooks,
    remove_hooks,
    replace_buffer,
    replace_child,
    restore_buffers,
    restore_child,
    stored,
)
from hf_posswap.patching.edits.settings import grow_buffer, grown
from hf_posswap.patching.record.refusals import SENTINEL_SHAPE
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.common.table import TableScheme

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


class BlendedTable(nn.Module):
    """Replaces a position table: returns its rows with weight 1 - w plus a new table's rows with weight w.

    In the state dict the old table is `old` and the new one `new`. A single zero as `weight` makes the native class
    fail to load it with a size mismatch, instead of using the old table unchanged.

    Args:
        native: the table's module; its own forward does the look-up.
        new: rows of the new table from position 0 on, [P, E], a parameter if they are trained; None: there is none.
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
        """Return the blended rows, [offset + P, E]."""
        if self.share == 0:
            return self.old
        old = (1 - self.share) * self.old
        if self.new is None:
            return old
        return torch.cat((self.old[: self.offset], old[self.offset :] + self.share * self.new))

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return the result of the table's own module for these arguments, with the blended rows."""
        return torch.func.functional_call(self.native, {"weight": self.blended()}, args, kwargs)

    def extra_repr(self) -> str:
        return f"share={self.share:g}"


@dataclass(frozen=True, kw_only=True)
class ReplaceTable(TouchesModule):
    """Writes a table scheme's rows into the model's own table; rows before position 0 stay.

    Attributes:
        scheme: of the rows, fitted if the weights could be read.
        rows: positions afterwards.
        offset: rows before position 0.
        geometry: of the stack.
    """

    needs_weights: ClassVar[bool] = True
    scheme: TableScheme
    rows: int
    offset: int
    geometry: Geometry

    def apply(self, model: Any, saved: Saved) -> None:
        embedding = model.get_submodule(self.path)
        saved["weight"] = old = embedding.weight
        new = self._rows(old.detach())
        embedding.weight = nn.Parameter(new.to(device=old.device, dtype=old.dtype), requires_grad=self.scheme.trainable)
        embedding.num_embeddings = new.shape[0]

    def _rows(self, old: Tensor) -> Tensor:
        """Return all rows of the new table, [offset + rows, E]."""
        if not holds_values(old):
            return old.new_empty(self.rows + self.offset, old.shape[1])
        rows = self.scheme.table(old[self.offset :], self.rows, self.geometry)
        return torch.cat((old[: self.offset].float().cpu(), rows))

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        if "weight" not in saved:
            return
        weight: nn.Parameter = saved["weight"]
        module = model.get_submodule(self.path)
        embedding = original_of(module)
        weight.data = weight.data.to(embedding.weight)  # device and dtype
        embedding.weight = weight
        embedding.num_embeddings = weight.shape[0]
        for trained in trained_copies_of(module):
            trained.weight = nn.Parameter(weight.detach().clone(), requires_grad=trained.weight.requires_grad)
            trained.num_embeddings = weight.shape[0]

    def check(self, model: PreTrainedModel) -> str | None:
        embedding = model.get_submodule(self.path)
        weight = stored(embedding, rows_name(embedding))
        if weight.shape[0] != self.rows + self.offset:
            return f"the table has {weight.shape[0]} rows instead of {self.rows + self.offset}"
        if weight.requires_grad and not self.scheme.trainable:
            return "the table is trainable where it should be frozen"
        if self.scheme.trainable or not holds_values(weight):
            return None
        actual, expected = weight[self.offset :], self._formula(weight)
        same = holds(actual, expected) if self.scheme.exact else not_rows(actual, expected, self.rows) is None
        return None if same else "the table differs from its formula"

    def _formula(self, weight: Tensor) -> Tensor:
        """Return the rows by the formula of a frozen table, [rows, E]."""
        return self.scheme.expected(weight.detach()[self.offset :].float().cpu(), self.geometry)

    def check_loaded(self, model: PreTrainedModel) -> str | None:
        weight = stored(model.get_submodule(self.path), "weight").detach()
        fits = len(weight) == self.rows + self.offset
        frozen = fits and not self.scheme.trainable and holds_values(weight)
        return not_rows(weight[self.offset :], self._formula(weight) if frozen else None, self.rows)

    def reload(self, model: PreTrainedModel) -> None:
        """Freeze rows that come from a formula; the rows are loaded."""
        self.freeze(model)

    def freeze(self, model: nn.Module) -> None:
        if not self.scheme.trainable:
            embedding = model.get_submodule(self.path)
            getattr(embedding, rows_name(embedding)).requires_grad_(False)

    def refusal(self, model: PreTrainedModel) -> str | None:
        old = stored(model.get_submodule(self.path), "weight")
        return unfitted(self.scheme, old[self.offset :], lambda table: self.scheme.fit(table, self.rows, self.geometry))


def rows_name(embedding: nn.Module) -> str:
    """Return the name of the parameter with the rows of a table, which may be inside a blend, and wrapped by PEFT."""
    return "old" if isinstance(original_of(embedding), BlendedTable) else "weight"


@dataclass(frozen=True, kw_only=True)
class BlendTable(PluginOnly, TouchesModule):
    """Blends the table out, and a new one of the same size in, if there is one.

    Attributes:
        scheme: of the new table, or None.
        share: of the new mechanism, in [0, 1].
        offset: rows before position 0.
        geometry: of the stack.
    """

    needs_weights: ClassVar[bool] = True
    scheme: TableScheme | None
    share: float
    offset: int
    geometry: Geometry

    def apply(self, model: Any, saved: Saved) -> None:
        native = model.get_submodule(self.path)
        new = self.new_rows(native.weight)
        saved["blended"] = True
        replace_everywhere(model, self.path, BlendedTable(native, new, self.share, self.offset))

    def new_rows(self, old: Tensor) -> Tensor | None:
        """Return the new table for the `old` one [P, E], a parameter if it is trained; None: there is none."""
        if self.scheme is None:
            return None
        rows = old.shape[0] - self.offset
        if not holds_values(old):
            return old.detach().new_empty(rows, old.shape[1])
        fitted = self.scheme.fit(old.detach()[self.offset :], rows, self.geometry)
        new = fitted.table(old.detach()[self.offset :], rows, self.geometry).to(old)
        return nn.Parameter(new) if self.scheme.trainable else new

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Restore the old table with its current weights, and each copy of it that PEFT trains."""
        table = model.get_submodule(self.path)
        for path, blended in list(table.named_modules(prefix=self.path)):
            if isinstance(blended, BlendedTable):
                blended.native.weight = blended.old
                replace_everywhere(model, path, blended.native)

    def check(self, model: PreTrainedModel) -> str | None:
        module = model.get_submodule(self.path)
        for blended in (original_of(module), *trained_copies_of(module)):
            if not isinstance(blended, BlendedTable):
                return "the table is not in the blend"
            if blended.share != self.share:
                return f"the blend has weight {blended.share} instead of {self.share}"
        return None

    def with_scheme(self, scheme: Scheme) -> Self:
        return replace(self, share=scheme.weight) if isinstance(scheme, Blend) else self


@dataclass(frozen=True, kw_only=True)
class RemoveTable(AppliedAgain, TouchesModule):
    """Removes the table; again after loading, as zero rows that stock transformers has loaded could be trained.

    Attributes:
        rows: zero rows that replace it in the state dict; None: a single zero, so that stock classes refuse.
        computed: whether the state dict never had it, so that it needs no placeholder.
    """

    needs_weights: ClassVar[bool] = True
    rows: int | None
    computed: bool = False

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        old = table_of(model.get_submodule(self.path))
        shape = SENTINEL_SHAPE if self.rows is None else (self.rows, old.shape[1])
        zeros = torch.zeros(shape, dtype=old.dtype, device=old.device)  # plain even if the table is quantised
        replace_child(model, self.path, NoPositions(zeros, saved=not self.computed), saved)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        restore_child(model, self.path, saved)

    def check(self, model: PreTrainedModel) -> str | None:
        module = model.get_submodule(self.path)
        empty = isinstance(module, NoPositions) and module.is_empty
        return None if empty else "the position table is still there"

    def check_loaded(self, model: PreTrainedModel) -> str | None:
        return not_zero(table_of(model.get_submodule(self.path)), rows=self.rows)


class NoTableRows(NoPositions):
    """Replaces a plain buffer [P, E] that a model indexes, and adds nothing.

    Args:
        weight: a single zero, [1].
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, saved=False)
        mark_initialised(self)  # otherwise transformers fills it like the buffer of its class

    def __getitem__(self, _: object) -> Tensor:
        return self.forward()


@dataclass(frozen=True, kw_only=True)
class RemoveTableBuffer(AppliedAgain, TouchesNothing):
    """Removes a table that is a plain buffer and not in checkpoints."""

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        owner, leaf = owner_of(model, self.path)
        saved["buffer"] = buffer = getattr(owner, leaf)
        delattr(owner, leaf)
        owner.add_module(leaf, NoTableRows(buffer.new_zeros(SENTINEL_SHAPE)))

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        if "buffer" not in saved:
            return
        owner, leaf = owner_of(model, self.path)
        zero, old = getattr(owner, leaf, None), saved["buffer"]
        if zero is not None:
            delattr(owner, leaf)
        buffer = old if zero is None or zero.weight.is_meta else old.to(zero.weight)  # device and dtype
        owner.register_buffer(leaf, buffer, persistent=False)

    def check(self, model: PreTrainedModel) -> str | None:
        owner, leaf = owner_of(model, self.path)
        return None if isinstance(getattr(owner, leaf, None), NoTableRows) else "the position table is still there"


@dataclass(frozen=True, kw_only=True)
class SaveKeys(AppliedAgain, TouchesNothing):
    """Makes the model save keys that its class excludes from checkpoints.

    Attributes:
        keys: of the state dict.
    """

    keys: tuple[str, ...]

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        others = [key for key in unsaved_keys(model) if key not in self.keys]
        saved["keys"] = set_unsaved_keys(model, others)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Restore the class's list of keys excluded from checkpoints."""
        if "keys" in saved:
            set_unsaved_keys(model, saved["keys"])

    def check(self, model: PreTrainedModel) -> str | None:
        left_out = [key for key in self.keys if key in unsaved_keys(model)]
        return f"{', '.join(left_out)} would not be saved" if left_out else None


def unfitted(table: object, old: Tensor, fit: Callable[[Tensor], object]) -> str | None:
    """Return why the resolved `table` cannot replace `old` [P, E] yet, because `old` has no values; or None.

    Args:
        table: a scheme.
        old: the table that it replaces.
        fit: returns `table` fitted to a table of that shape.
    """
    if holds_values(old) or table == fit(torch.ones(old.shape, dtype=old.dtype)):
        return None
    return f"{table} needs a value from the old table's weights, and this model's are on meta or fake."


@dataclass(eq=False)
class LengthHook:
    """Pre-hook of the module that takes the input: grows buffers to the length, or raises beyond the table's end.

    Attributes:
        model_name: for the message.
        capacity: positions of the table; None: there is none.
        offset: rows of the table and the buffers before position 0.
        first: the value of the model's `position_ids` for position 0.
        buffers: names, below the module, of buffers [1, P] with one entry a position; they grow as needed.
        signature: names of the module's positional arguments.
        block: the module pads `inputs_embeds` to a multiple of this, and the padding takes positions.
    """

    model_name: str
    capacity: int | None
    offset: int
    first: int
    buffers: tuple[str, ...]
    signature: list[str]
    block: int = 1

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given = by_name(self.signature, args, kwargs)
        cache_argument = find_cache(args, kwargs)
        length = _tokens(given, self.block) + _past(None if cache_argument is None else cache_argument[1])
        position_ids = given.get("position_ids")
        if position_ids is not None and not torch.compiler.is_compiling():
            too_many = self.capacity is not None and length > self.capacity and position_ids.device.type != "meta"
            if position_ids.device.type == "cpu" or self.buffers or too_many:  # elsewhere it waits for the device
                reach = int(position_ids.max()) + 1 - self.first
                packed = self.capacity is not None and "position_ids" in self.signature  # each text begins anew
                length = reach if packed else max(length, reach)
        if self.capacity is None:
            for name in self.buffers:
                grow_buffer(module, name, length + self.offset)
            return
        if length > self.capacity:
            raise PositionRangeError(
                f"{self.model_name} was asked for {length} positions"
                f"{f' (inputs_embeds are padded to a multiple of {self.block})' if self.block > 1 else ''}, but its "
                f"position table ends at {self.capacity}. "
                f"Extend the table when patching: patch_model(model, ..., max_length={length}), or swap to a scheme "
                "without a table."
            )


def _tokens(given: dict[str, Any], block: int) -> int:
    """Return L of the input ids [..., L] or embeddings [..., L, E] among the arguments; 0 if there are none.

    The L of embeddings is rounded up to a multiple of `block`.
    """
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if ids is not None:
        return ids.shape[-1]
    return 0 if embeddings is None else embeddings.shape[-2] + -embeddings.shape[-2] % block


def _past(cache: Cache | None) -> int:
    if cache is None or is_paged_cache(cache):  # it holds many texts
        return 0
    past = cache.get_seq_length()
    if isinstance(past, Tensor):  # a static cache has a fixed end
        return 0 if torch.compiler.is_compiling() or past.device.type != "cpu" else int(past)
    return past


@dataclass(frozen=True, kw_only=True)
class GuardLength(AppliedAgain, TouchesNothing):
    """Makes the model raise beyond the end of its table, or grow its buffers if it has no end.

    Attributes:
        entry: path of the module that takes the input.
        capacity: positions of the table; None: there is none.
        offset: rows of the table and of the buffers before position 0.
        first: the value of the model's `position_ids` for position 0.
        buffers: paths of buffers with one entry a position; they grow as needed.
        length: positions for which the buffers have room from the start.
        block: the entry pads `inputs_embeds` to a multiple of this, and the padding takes positions.
    """

    entry: str
    capacity: int | None
    offset: int
    first: int
    buffers: tuple[str, ...]
    length: int
    block: int = 1

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        length = self.length + self.offset
        for path in self.buffers:
            replace_buffer(model, path, partial(grown, name=path.rpartition(".")[2], length=length), saved)
        self._watch(model, saved)

    def _watch(self, model: nn.Module, saved: Saved) -> None:
        entry = model.get_submodule(self.entry)
        below = tuple(path.removeprefix(self.entry).lstrip(".") for path in self.buffers)
        hook = LengthHook(
            type(model).__name__, self.capacity, self.offset, self.first, below, entry_signature(entry), self.block
        )
        keep_hooks(saved, entry.register_forward_pre_hook(hook, with_kwargs=True))

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        remove_hooks(saved)
        restore_buffers(model, saved)

    def check(self, model: PreTrainedModel) -> str | None:
        hooks = pre_hooks(model.get_submodule(self.entry))
        watched = any(isinstance(hook, LengthHook) for hook in hooks)
        return None if watched else "the hook that watches the length is gone"
