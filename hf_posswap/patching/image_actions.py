"""The surgery of each edit in a model that sees images, and how to undo it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.families.images import tensor_at
from hf_posswap.geometry import Geometry
from hf_posswap.patching.actions import RemoveHook, Undo
from hf_posswap.patching.attention_actions import PatchAttention
from hf_posswap.patching.attention_call import CALL_ARGUMENT, AttentionCall
from hf_posswap.patching.attention_hooks import PositionHook
from hf_posswap.patching.embedding import SENTINEL_SHAPE
from hf_posswap.patching.image_rows import ASKED, PLACES, AskForRows, GridRows, TellPlacesHook
from hf_posswap.patching.interface import RestoreSize
from hf_posswap.patching.positions import Span, told_by
from hf_posswap.schemes.grid_table import GridTable


@dataclass
class RestoreParameter:
    """Puts a parameter back, where the model has moved meanwhile and cast as it was, and in its old place."""

    path: str
    parameter: nn.Parameter
    order: tuple[str, ...]

    def __call__(self, model: nn.Module) -> None:
        owner, leaf = _owner(model, self.path)
        self.parameter.data = self.parameter.data.to(getattr(owner, leaf))  # device and dtype
        _put(owner, leaf, self.parameter, self.order)


@dataclass(frozen=True)
class _OfTable:
    """What the edits of the table's parameter share.

    Attributes:
        path: of the parameter, [P, E] or [1, P, E].
        geometry: of the model.
    """

    path: str
    geometry: Geometry

    def old(self, model: Any) -> Tensor:
        """Return the rows of the patches as they are, [R C, E]."""
        return self.rows(model)[self.geometry.prefix_tokens :].detach()

    def rows(self, model: Any) -> Tensor:
        """Return all rows as they are, [P, E]."""
        held = tensor_at(model, self.path)
        assert held is not None
        return held.flatten(0, -2)

    def replace(self, model: Any, undo: list[Undo], new: Tensor, *, trainable: bool) -> None:
        """Put `new`, of the shape that it is to have, in the place of the parameter."""
        owner, leaf = _owner(model, self.path)
        old, order = getattr(owner, leaf), tuple(owner._parameters)
        undo.insert(0, RestoreParameter(self.path, old, order))
        new = new.to(device=old.device, dtype=old.dtype)
        _put(owner, leaf, nn.Parameter(new, requires_grad=trainable and old.requires_grad), order)


@dataclass(frozen=True)
class ReplaceGridTable(_OfTable):
    """Writes the rows of a scheme for patches into the model's own table; those of other tokens stay.

    Attributes:
        scheme: resolved, and fitted where weights are read.
    """

    scheme: GridTable

    def apply(self, model: Any, undo: list[Undo]) -> None:
        held, rows = tensor_at(model, self.path), self.rows(model).detach()
        assert held is not None
        count = self.geometry.prefix_tokens + _count(self.scheme.grid(self.geometry))
        shape = (*held.shape[:-2], count, held.shape[-1])
        if held.is_meta:
            new = torch.empty(shape, device="meta")
        else:
            prefix = rows[: self.geometry.prefix_tokens].cpu()
            new = torch.cat((prefix.to(torch.promote_types(prefix.dtype, torch.float32)), self._made(rows))).view(shape)
        self.replace(model, undo, new, trainable=self.scheme.trainable)

    def _made(self, rows: Tensor) -> Tensor:
        patches = rows[self.geometry.prefix_tokens :].cpu()
        return self.scheme.table(patches, self.geometry.grid(), self.scheme.grid(self.geometry), self.geometry)

    def dress(self, model: Any) -> None:
        """Freeze what is a formula's in a model that was loaded with its rows already there."""
        held = tensor_at(model, self.path)
        assert held is not None
        held.requires_grad_(self.scheme.trainable)

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        rows, grid = self.rows(model), self.scheme.grid(self.geometry)
        count = self.geometry.prefix_tokens + _count(grid)
        if len(rows) != count:
            return f"the table has {len(rows)} rows instead of {count}"
        if rows.requires_grad and not self.scheme.trainable:
            return "the table is trainable where it should be frozen"
        if self.scheme.trainable or rows.is_meta:
            return None
        held = self.old(model).cpu()
        same = torch.equal(held, self.scheme.table(held, grid, grid, self.geometry).to(held.dtype))
        return None if same else "the table does not hold what its formula gives"


@dataclass(frozen=True)
class RemoveGridTable(_OfTable):
    """Takes the rows of the patches away; those of other tokens, which have no place, stay.

    Attributes:
        native: whether zero rows stand for them in the state dict, so that stock classes run it; otherwise nothing
            does, and the native class fails to load the rest with a size mismatch.
    """

    native: bool

    def apply(self, model: Any, undo: list[Undo]) -> None:
        held, prefix = tensor_at(model, self.path), self.geometry.prefix_tokens
        assert held is not None
        if self.native:
            new = held.detach().clone()
            new.flatten(0, -2)[prefix:] = 0
        elif prefix:
            new = held.detach()[..., :prefix, :].clone()
        else:
            new = held.new_zeros(SENTINEL_SHAPE).detach()
        self.replace(model, undo, new, trainable=bool(prefix))

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        held, prefix = tensor_at(model, self.path), self.geometry.prefix_tokens
        assert held is not None
        if held.is_meta:
            return None
        left = held.flatten(0, -2)[prefix:] if held.ndim > 1 else held
        expected = self.geometry.original_length - prefix if self.native else 0 if prefix else 1
        return None if len(left) == expected and not left.any() else "the table of the patches is still there"


@dataclass(frozen=True)
class SetRowIds:
    """Gives the buffer [1, P] of row numbers at `path` so many as the table has rows."""

    path: str
    count: int

    def apply(self, model: Any, undo: list[Undo]) -> None:
        owner, leaf = _owner(model, self.path)
        old = getattr(owner, leaf)
        undo.insert(0, RestoreSize(self.path, old))
        setattr(owner, leaf, torch.arange(self.count, device=old.device, dtype=old.dtype)[None])

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        held = model.get_buffer(self.path).shape[-1]
        return None if held == self.count else f"it numbers {held} rows instead of {self.count}"


@dataclass
class RestoreMethod:
    """Lets a module's class give its rows again."""

    path: str

    def __call__(self, model: nn.Module) -> None:
        delattr(model.get_submodule(self.path), ASKED)


@dataclass(frozen=True)
class AnyImageSize:
    """Makes images of any size get the rows of their own grid.

    Attributes:
        path: of the module that makes tokens of an image.
        table: path of the parameter that holds the table, below it.
        scheme: of the table; None: patches have no rows.
        geometry: of the model.
        native: the image size in the swapped model's config.
        square: whether the model's head takes the patches for a square.
    """

    path: str
    table: str
    scheme: GridTable | None
    geometry: Geometry
    native: tuple[int, int]
    square: bool

    def apply(self, model: Any, undo: list[Undo]) -> None:
        module = model.get_submodule(self.path)
        undo.insert(0, RestoreMethod(self.path))
        setattr(module, ASKED, GridRows(module, self.table, self.scheme, self.geometry))
        hook = AskForRows(type(model).__name__, self.geometry, self.native, self.square)
        undo.insert(0, RemoveHook(module.register_forward_pre_hook(hook, with_kwargs=True)))

    def dress(self, model: Any) -> None:
        """Do the same in a model that was loaded with its rows already there."""
        self.apply(model, [])

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        module = model.get_submodule(self.path)
        rows = vars(module).get(ASKED)
        asked = any(isinstance(hook, AskForRows) for hook in module._forward_pre_hooks.values())
        good = asked and isinstance(rows, GridRows) and rows.scheme == self.scheme and rows.embeddings is module
        return None if good else "the rows of the patches are not those of the scheme"


@dataclass(frozen=True)
class TellPlaces:
    """Makes the module at `path`, which takes the image, tell attention modules where the tokens lie."""

    path: str
    geometry: Geometry

    def apply(self, model: Any, undo: list[Undo]) -> None:
        hook, module = TellPlacesHook(self.geometry), model.get_submodule(self.path)
        undo.insert(0, RemoveHook(module.register_forward_pre_hook(hook, with_kwargs=True)))

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        hooks = model.get_submodule(self.path)._forward_pre_hooks.values()
        return None if any(isinstance(hook, TellPlacesHook) for hook in hooks) else "places are not told to attention"


class PlaceHook(PositionHook):
    """Pre-hook of an attention module that was told of places: tells the attention function."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        call = AttentionCall(self.mechanism, self._span(kwargs[PLACES]), self.memo, keys_rotated=False)
        return args, {**{k: v for k, v in kwargs.items() if k != PLACES}, CALL_ARGUMENT: call}

    def _span(self, places: Tensor) -> Span:
        return self.memo.shared(told_by(places), lambda made: Span(places, 0, places.shape[1], 0, 0, True, made))


@dataclass(frozen=True)
class PatchImageAttention(PatchAttention):
    """Puts a scheme for places between an attention module's projections and its attention implementation."""

    hook = PlaceHook


def _owner(model: Any, path: str) -> tuple[Any, str]:
    owner, _, leaf = path.rpartition(".")
    return model.get_submodule(owner), leaf


def _put(owner: Any, leaf: str, parameter: nn.Parameter, order: tuple[str, ...]) -> None:
    """Set a parameter in the place that it has in `order`: optimizers count."""
    setattr(owner, leaf, parameter)
    for name in order:
        owner._parameters[name] = owner._parameters.pop(name)
    if isinstance(owner, nn.Embedding):
        owner.num_embeddings = parameter.shape[0]


def _count(grid: tuple[int, int]) -> int:
    return grid[0] * grid[1]
