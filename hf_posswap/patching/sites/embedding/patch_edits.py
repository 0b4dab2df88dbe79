"""The edits of a table of patches: replaced, removed, or made to support any grid of patches."""

from __future__ import annotations

import inspect
from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.errors import PositionRangeError
from hf_posswap.families.modules import WeakModule, owner_of, tensor_at
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.edit import AppliedAgain, Edit, Saved, TouchesNothing
from hf_posswap.patching.edits.removed_table import holds, not_rows, not_zero
from hf_posswap.patching.edits.restore import keep_hooks, remove_hooks, replace_buffer
from hf_posswap.patching.edits.settings import BufferEdit
from hf_posswap.patching.record.refusals import SENTINEL_SHAPE
from hf_posswap.patching.sites.embedding.table_edits import unfitted
from hf_posswap.schemes.common.table import GridTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS_METHOD = "interpolate_pos_encoding"
"""The name in transformers of the method that returns the rows, and of the argument that enables it."""


class GridRows:
    """Replaces the method `interpolate_pos_encoding` of a module that turns an image into tokens.

    Args:
        embeddings: that module.
        table: path of the parameter that holds the table, below it.
        scheme: of the table; None: only tokens that are not patches have rows.
        geometry: of the model.
    """

    def __init__(self, embeddings: nn.Module, table: str, scheme: GridTable | None, geometry: Geometry) -> None:
        self.embeddings = WeakModule(embeddings)  # weak, because this is its method
        self.table, self.scheme, self.geometry = table, scheme, geometry

    def __call__(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Return the rows [1, N, E] of all tokens of an image of this size in pixels, in the dtype of `embeddings`."""
        table = tensor_at(self.embeddings(), self.table)
        assert table is not None
        prefix, grid = self.geometry.prefix_tokens, self.geometry.grid((height, width))
        rows = table.flatten(0, -2) if table.ndim > 1 else table.new_zeros((0, embeddings.shape[-1]))  # a single zero
        if self.scheme is None:
            patches = rows.new_zeros((grid[0] * grid[1], rows.shape[-1]))
        else:
            patches, native = rows[prefix:], self.scheme.grid(self.geometry)
            if grid != native:
                patches = self.scheme.table(patches, native, grid, self.geometry).to(rows)
        return torch.cat((rows[:prefix], patches))[None].to(embeddings.dtype)


@dataclass(eq=False)
class RowsHook:
    """Pre-hook of the module that turns an image into tokens: requests the rows of the image's own grid.

    Attributes:
        model_name: for messages.
        geometry: of the model.
        native: the image size in the model's config, which patches need not divide.
        square: whether the model's head assumes a square of patches.
    """

    model_name: str
    geometry: Geometry
    native: tuple[int, int]
    square: bool

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any, Any]:
        pixels: Any = args[0] if args else kwargs["pixel_values"]
        self.check((pixels.shape[-2], pixels.shape[-1]))
        takes = inspect.signature(type(module).forward).parameters
        # a forward without this argument always requests the rows
        return args, {**kwargs, ROWS_METHOD: True} if ROWS_METHOD in takes else kwargs

    def check(self, size: tuple[int, int]) -> None:
        """Refuse an image size that patches do not divide, or that the model's head does not support.

        Raises:
            PositionRangeError: the size is not supported.
        """
        patch = self.geometry.patch_size
        assert patch is not None
        rows, columns = self.geometry.grid(size)
        rest = size not in (self.native, self.geometry.image_size) and (size[0] % patch[0] or size[1] % patch[1])
        if rest or not rows or not columns:
            raise PositionRangeError(
                f"{self.model_name} was given images of {size[0]} x {size[1]} pixels, which is not a whole number "
                f"of patches of {patch[0]} x {patch[1]}: resize or pad them."
            )
        if self.square and rows != columns:
            raise PositionRangeError(
                f"{self.model_name} was given images of {rows} x {columns} patches, and its head needs as many rows as "
                "columns: give square images."
            )


@dataclass(frozen=True, kw_only=True)
class _PatchTableEdit(Edit, ABC):
    """Base of the edits of the parameter [P, E] or [1, P, E] at `path`.

    Attributes:
        geometry: of the stack.
    """

    geometry: Geometry

    def rows(self, model: nn.Module) -> Tensor:
        """Return all current rows, [P, E]."""
        table = tensor_at(model, self.path)
        assert table is not None
        return table.flatten(0, -2)

    def patches(self, model: PreTrainedModel) -> Tensor:
        """Return the current rows of the patches, [R C, E]."""
        return self.rows(model)[self.geometry.prefix_tokens :].detach()

    def replace(self, model: nn.Module, saved: Saved, new: Tensor) -> None:
        """Replace the parameter by `new`, which already has the right shape."""
        owner, leaf = owner_of(model, self.path)
        old, order = getattr(owner, leaf), tuple(name for name, _ in owner.named_parameters(recurse=False))
        saved |= {"parameter": old, "order": order}
        new = new.to(device=old.device, dtype=old.dtype)
        _put(owner, leaf, nn.Parameter(new, requires_grad=self.trainable and old.requires_grad), order)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Restore the parameter, moved and cast like the model since then, at its old index."""
        if "parameter" in saved:
            owner, leaf = owner_of(model, self.path)
            saved["parameter"].data = saved["parameter"].data.to(getattr(owner, leaf))
            _put(owner, leaf, saved["parameter"], saved["order"])

    @property
    def trainable(self) -> bool:
        """Whether the parameter may be trained afterwards."""
        raise NotImplementedError

    def reload(self, model: PreTrainedModel) -> None:
        """Freeze rows that come from a formula, or zero rows alone; the rows are loaded."""
        self.freeze(model)

    def freeze(self, model: nn.Module) -> None:
        if not self.trainable:
            table = tensor_at(model, self.path)
            assert table is not None
            table.requires_grad_(False)

    @property
    def touches(self) -> tuple[str, ...]:
        return (self.path,)


@dataclass(frozen=True, kw_only=True)
class ReplacePatchTable(_PatchTableEdit):
    """Writes the rows of a scheme for patches into the model's own table; those of other tokens stay.

    Attributes:
        scheme: resolved, and fitted if weights are available.
    """

    scheme: GridTable

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        old, rows = tensor_at(model, self.path), self.rows(model).detach()
        assert old is not None
        geometry, grid = self.geometry, self.scheme.grid(self.geometry)
        shape = (*old.shape[:-2], geometry.prefix_tokens + _count(grid), old.shape[-1])
        if not holds_values(old):
            new = old.detach().new_empty(shape)
        else:
            prefix, patches = rows[: geometry.prefix_tokens].cpu(), rows[geometry.prefix_tokens :].cpu()
            prefix = prefix.to(torch.promote_types(prefix.dtype, torch.float32))
            new = torch.cat((prefix, self.scheme.table(patches, geometry.grid(), grid, geometry))).view(shape)
        self.replace(model, saved, new)

    @property
    def trainable(self) -> bool:
        return self.scheme.trainable

    def check(self, model: PreTrainedModel) -> str | None:
        rows, grid = self.rows(model), self.scheme.grid(self.geometry)
        count = self.geometry.prefix_tokens + _count(grid)
        if len(rows) != count:
            return f"the table has {len(rows)} rows instead of {count}"
        if rows.requires_grad and not self.scheme.trainable:
            return "the table is trainable where it should be frozen"
        if self.scheme.trainable or not holds_values(rows):
            return None
        same = holds(self.patches(model), self._formula(model))
        return None if same else "the table differs from its formula"

    def _formula(self, model: PreTrainedModel) -> Tensor:
        """Return the rows of the patches by the formula of a frozen table, [R C, E]."""
        grid = self.scheme.grid(self.geometry)
        return self.scheme.table(self.patches(model).float().cpu(), grid, grid, self.geometry)

    def check_loaded(self, model: PreTrainedModel) -> str | None:
        patches, count = self.patches(model), _count(self.scheme.grid(self.geometry))
        frozen = len(patches) == count and not self.scheme.trainable and holds_values(patches)
        return not_rows(patches, self._formula(model) if frozen else None, count)

    def refusal(self, model: PreTrainedModel) -> str | None:
        return unfitted(self.scheme, self.patches(model), lambda old: self.scheme.fit(old, self.geometry))


@dataclass(frozen=True, kw_only=True)
class RemovePatchTable(_PatchTableEdit):
    """Removes the rows of the patches; those of other tokens stay.

    Attributes:
        native: whether zero rows replace them in the state dict, so that stock classes run it; otherwise they are
            missing, and the native class fails to load the rest with a size mismatch.
    """

    native: bool

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        old, prefix = tensor_at(model, self.path), self.geometry.prefix_tokens
        assert old is not None
        if self.native:
            new = old.detach().clone()
            new.flatten(0, -2)[prefix:] = 0
        elif prefix:
            new = old.detach()[..., :prefix, :].clone()
        else:
            new = old.new_zeros(SENTINEL_SHAPE).detach()
        self.replace(model, saved, new)

    def check(self, model: PreTrainedModel) -> str | None:
        table, prefix = tensor_at(model, self.path), self.geometry.prefix_tokens
        assert table is not None
        if not holds_values(table):
            return None
        left = table.flatten(0, -2)[prefix:] if table.ndim > 1 else table
        expected = self.geometry.original_length - prefix if self.native else 0 if prefix else 1
        return None if len(left) == expected and not left.any() else "the table of the patches is still there"

    def check_loaded(self, model: PreTrainedModel) -> str | None:
        return not_zero(self.patches(model))

    @property
    def trainable(self) -> bool:
        return bool(self.geometry.prefix_tokens)


@dataclass(frozen=True, kw_only=True)
class SetRowIds(BufferEdit):
    """Gives the buffer [1, P] of row numbers at `path` one entry per table row.

    Attributes:
        count: P, afterwards.
    """

    count: int

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        replace_buffer(model, self.path, self._numbered, saved)

    def _numbered(self, _: object, old: Tensor) -> Tensor:
        return torch.arange(self.count, device=old.device, dtype=old.dtype)[None]

    def check(self, model: PreTrainedModel) -> str | None:
        count = model.get_buffer(self.path).shape[-1]
        return None if count == self.count else f"it numbers {count} rows instead of {self.count}"


@dataclass(frozen=True, kw_only=True)
class AnyImageSize(AppliedAgain, TouchesNothing):
    """Gives images of any size the rows of their own grid; `path` is the module that turns an image into tokens.

    Attributes:
        table: path of the parameter that holds the table, below that module.
        scheme: of the table; None: patches have no rows.
        geometry: of the stack.
        native: the image size in the swapped model's config.
        square: whether the model's head assumes a square of patches.
    """

    table: str
    scheme: GridTable | None
    geometry: Geometry
    native: tuple[int, int]
    square: bool

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        module = model.get_submodule(self.path)
        setattr(module, ROWS_METHOD, GridRows(module, self.table, self.scheme, self.geometry))
        hook = RowsHook(type(model).__name__, self.geometry, self.native, self.square)
        keep_hooks(saved, module.register_forward_pre_hook(hook, with_kwargs=True))

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Restore the method of the module's class."""
        vars(model.get_submodule(self.path)).pop(ROWS_METHOD, None)
        remove_hooks(saved)

    def check(self, model: PreTrainedModel) -> str | None:
        module = model.get_submodule(self.path)
        rows = vars(module).get(ROWS_METHOD)
        has_hook = any(isinstance(hook, RowsHook) for hook in pre_hooks(module))
        good = has_hook and isinstance(rows, GridRows) and rows.scheme == self.scheme and rows.embeddings() is module
        return None if good else "the rows of the patches are not those of the scheme"


def _put(owner: nn.Module, leaf: str, parameter: nn.Parameter, order: tuple[str, ...]) -> None:
    """Set a parameter at its index in `order`: optimizers refer to parameters by index."""
    parameters = dict(owner.named_parameters(recurse=False)) | {leaf: parameter}
    for name in order:
        delattr(owner, name)
    for name in order:
        setattr(owner, name, parameters[name])
    if isinstance(owner, nn.Embedding):
        owner.num_embeddings = parameter.shape[0]


def _count(grid: tuple[int, int]) -> int:
    return grid[0] * grid[1]
