"""Working out the edits that put a scheme for images into a stack that sees them, outside its attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.images import ImageSites, tensor_at
from hf_posswap.families.modules import get, join
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.actions import Action, SetAttribute
from hf_posswap.patching.image_actions import AnyImageSize, RemoveGridTable, ReplaceGridTable, SetRowIds
from hf_posswap.patching.offloaded import hooks_of
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.grid_table import GridTable
from hf_posswap.schemes.learned_2d import Learned2D

Draft = tuple[str, str, str, str, Action]
"""An edit: site, path, before, after, action."""


@dataclass
class ImagePlan:
    """What a plan is told of a stack that sees images; see `SwapPlan`."""

    edits: list[Draft] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def image_plan(model: Any, sites: Sites, stack: Stack, scheme: Scheme, site: Literal["auto", "attention"]) -> ImagePlan:
    """Return what puts a resolved `scheme` into `stack`, but for what acts inside attention.

    Raises:
        UnsupportedSwapError: the model's config cannot say the image size, or the scheme is not for that site.
    """
    image, plan = stack.image, ImagePlan()
    assert image is not None
    if site == "attention" and not scheme.acts_inside:
        raise UnsupportedSwapError(
            f"{scheme.name} does not act inside attention, and {type(model).__name__} was asked for at the attention "
            "site. What works: rope_2d, alibi_2d."
        )
    _refuse_kept_elsewhere(model, image, scheme)
    if isinstance(scheme, GridTable):
        _replace(plan, model, stack, image, scheme)
    else:
        _remove(plan, model, stack, image, native=not scheme.acts_inside)
    table = scheme if isinstance(scheme, GridTable) else None
    leaf = image.table.removeprefix(f"{image.embeddings}.")
    native = scheme.filled("image_size") if isinstance(scheme, GridTable) else stack.geometry.image_size
    assert native is not None
    any_size = AnyImageSize(image.embeddings, leaf, table, stack.geometry, native, image.square_head)
    plan.edits.append(("embedding", image.embeddings, "one image size", "images of any size", any_size))
    plan.notes += [
        f"{type(model).__name__} reads text too: {tower} keeps its positions."
        for tower in sites.family.kept
        if get(model, tower) is not None
    ]
    return plan


def _refuse_kept_elsewhere(model: Any, image: ImageSites, scheme: Scheme) -> None:
    """Refuse a table that is not held by its own module as numbers: what a swap writes would not be what is read."""
    table = tensor_at(model, image.table)
    for path in dict.fromkeys((image.embeddings, image.table.rpartition(".")[0])):
        module = model.get_submodule(path)
        if any(hooks_of(module)):
            kept = "is offloaded by accelerate", "patch the model first and dispatch it then"
        elif hasattr(module, "base_layer") or hasattr(module, "original_module"):
            kept = "carries an adapter of PEFT", "patch first and add the adapter then, or merge_and_unload() before"
        elif table is not None and not table.is_floating_point():
            kept = "is quantised", "patch first and quantise then"
        else:
            continue
        raise UnsupportedSwapError(
            f"{path!r} {kept[0]}, and {scheme.name} changes the table in it. What works: {kept[1]}."
        )


def kept_or_resized(scheme: Scheme, geometry: Geometry) -> str | None:
    """Return what training a model with a table that was kept, or resized, will need; None: `scheme` does neither."""
    if not isinstance(scheme, Learned2D):
        return None
    if scheme.grid(geometry) == geometry.grid():
        return "none: the table is kept"
    return "optional: usable untrained, better after a short training at the new image size"


def _replace(plan: ImagePlan, model: Any, stack: Stack, image: ImageSites, scheme: GridTable) -> None:
    geometry, size = stack.geometry, scheme.filled("image_size")
    if size != geometry.image_size:
        if image.square_config and size[0] != size[1]:
            raise UnsupportedSwapError(
                f"{scheme.name}: image_size {size[0]} x {size[1]} cannot be said in the config of "
                f"{type(model).__name__}, which takes square images alone. What works: a square image_size; images of "
                "other shapes run after the swap in any case."
            )
        plan.values[join(stack.config, "image_size")] = size[0] if size[0] == size[1] else list(size)
    after = f"{scheme.name}, {_shape(scheme.grid(geometry))}"
    plan.edits.append(
        ("embedding", image.table, _table(geometry), after, ReplaceGridTable(image.table, geometry, scheme))
    )
    if plan.values:
        plan.edits += _followed(model, image, plan.values)
    rows, columns = scheme.grid(geometry)
    grown = (rows * columns + geometry.prefix_tokens - geometry.original_length) * geometry.hidden_size
    if grown > 0 and scheme.trainable:
        plan.added[f"{image.table} (new rows)"] = grown


def _remove(plan: ImagePlan, model: Any, stack: Stack, image: ImageSites, *, native: bool) -> None:
    geometry = stack.geometry
    after = "nothing added to patches"
    remove = RemoveGridTable(image.table, geometry, native)
    plan.edits.append(("embedding", image.table, _table(geometry), after, remove))
    rows, columns = geometry.grid()
    plan.unused[f"{image.table} (rows of patches)"] = rows * columns * geometry.hidden_size


def _followed(model: Any, image: ImageSites, values: dict[str, Any]) -> Iterator[Draft]:
    """Yield what a stock model of another image size has otherwise, where it makes tokens of an image."""
    trial = copy.deepcopy(model.config)
    for name, value in values.items():
        part, _, leaf = name.rpartition(".")
        setattr(config_at(trial, part), leaf, value)
    with torch.device("meta"):
        fresh = getattr(type(model), "posswap_native", type(model))(trial)
    for path, module in fresh.get_submodule(image.embeddings).named_modules(prefix=image.embeddings):
        for name, new in vars(module).items():
            old = vars(model.get_submodule(path)).get(name)
            if isinstance(new, int | tuple | list) and not name.startswith("_") and old != new:
                yield "embedding", f"{path}.{name}", str(old), str(new), SetAttribute(path, name, old, new)
    if image.ids is not None:
        count = fresh.get_buffer(image.ids).shape[-1]
        yield "embedding", image.ids, f"{_length(model, image.ids)} rows", f"{count} rows", SetRowIds(image.ids, count)


def _length(model: Any, path: str) -> int:
    return model.get_buffer(path).shape[-1]


def _table(geometry: Geometry) -> str:
    return f"learned table, {_shape(geometry.grid())}"


def _shape(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]} patches"
