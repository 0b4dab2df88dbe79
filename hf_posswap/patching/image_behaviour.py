"""Proof by running a swapped model that sees images: on noise, with its patches shuffled, and at another size."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import SwapVerificationError
from hf_posswap.families.images import tensor_at
from hf_posswap.families.sites import Stack
from hf_posswap.patching.image_actions import AnyImageSize
from hf_posswap.patching.plan import SwapPlan
from hf_posswap.schemes.grid_table import GridTable
from hf_posswap.schemes.learned_2d import Learned2D

Size = tuple[int, int]


@dataclass(frozen=True)
class _Subject:
    """A swapped model, and how its part that sees images is run.

    Attributes:
        model: whole.
        stack: that sees images.
        generator: of the noise.
    """

    model: Any
    stack: Stack
    generator: torch.Generator

    def noise(self, size: Size) -> Tensor:
        """Return an image [1, C, height, width] of noise."""
        assert self.stack.spec.image is not None
        assert self.stack.image is not None
        patches: Any = self.model.get_submodule(self.stack.image.embeddings).get_submodule(
            self.stack.spec.image.patches
        )
        pixels = torch.randn(1, patches.in_channels, *size, generator=self.generator)
        return pixels.to(patches.weight)

    def run(self, pixels: Tensor) -> Tensor:
        """Return the last hidden states of all tokens, [N, E], float32."""
        tower = self.model.get_submodule(self.stack.entry)
        return tower(pixel_values=pixels).last_hidden_state[0].float()

    def shuffled(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image with its patches in another order, and which tokens come to stand where, [N]."""
        (high, wide), (rows, columns) = (
            self.stack.geometry.patch_size or (1, 1),
            self.stack.geometry.grid(_size(pixels)),
        )
        cut = pixels[..., : rows * high, : columns * wide].clone()
        tiles = cut.unflatten(3, (columns, wide)).unflatten(2, (rows, high)).transpose(3, 4).flatten(2, 3)
        order = torch.randperm(rows * columns, generator=self.generator)
        tiles = tiles[:, :, order]  # [1, C, R C, high, wide]
        mixed = pixels.clone()
        mixed[..., : rows * high, : columns * wide] = (
            tiles.unflatten(2, (rows, columns)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
        )
        prefix = self.stack.geometry.prefix_tokens
        return mixed, torch.cat((torch.arange(prefix), order + prefix)).to(pixels.device)


def image_behaviour(model: Any, seed: int) -> dict[str, str]:
    """Run a copy of a swapped `model` that shares its weights, and return what was found by each check.

    Raises:
        SwapVerificationError: a check failed.
    """
    from hf_posswap.patching.behaviour import shadow

    # noise of half precision may hide a weak mechanism
    twin = (shadow(model) if model.dtype == torch.float32 else copy.deepcopy(model).float()).eval()
    plan: SwapPlan = twin._posswap.plan
    subject = _Subject(twin, plan.sites.main, torch.Generator().manual_seed(seed))
    size = next(edit.action.native for edit in plan.edits if isinstance(edit.action, AnyImageSize))
    with torch.no_grad():
        pixels = subject.noise(size)
        states = subject.run(pixels)
        if not torch.isfinite(states).all():
            raise SwapVerificationError("the swapped model gives states that are not finite.")
        noise, rounded = (
            0.3 * torch.finfo(dtype).eps ** 0.5 * float(states.abs().max()) + 1e-6
            for dtype in (twin.dtype, model.dtype)
        )
        found = {"finite": f"states up to {float(states.abs().max()):.3g}", "order of patches": ""}
        found["order of patches"] = _order(subject, plan, pixels, noise)
        found["other image size"] = _other_size(subject, size)
        found["unswapped model"] = _unswapped(subject, plan, rounded)
    return found


def _order(subject: _Subject, plan: SwapPlan, pixels: Tensor, noise: float) -> str:
    """Shuffle the patches: every mechanism must notice, but for one that knows no positions, which must not."""
    mixed, order = subject.shuffled(pixels)
    gap = float((subject.run(pixels)[order] - subject.run(mixed)).abs().max())
    found = f"shuffling the patches moves their states by {gap:.3g}"
    if plan.scheme.kind == "none":
        if gap > noise:
            raise SwapVerificationError(f"{plan.scheme}: {found}, and nothing should tell one patch from another.")
        return found
    if gap > noise:
        return found
    if isinstance(plan.scheme, GridTable) and _is_even(subject):
        return f"{found}: the rows of the table are all the same until it is trained"
    raise SwapVerificationError(f"{plan.scheme}: the states do not depend on the order of the patches ({gap:.3g}).")


def _is_even(subject: _Subject) -> bool:
    """Return whether the table gives each patch the same row."""
    assert subject.stack.image is not None
    held = tensor_at(subject.model, subject.stack.image.table)
    assert held is not None
    rows = held.flatten(0, -2)[subject.stack.geometry.prefix_tokens :]
    return torch.equal(rows, rows[:1].expand_as(rows))


def _other_size(subject: _Subject, size: Size) -> str:
    geometry, image = subject.stack.geometry, subject.stack.image
    assert geometry.patch_size is not None
    assert image is not None
    rows, columns = geometry.grid(size)
    other = (rows + 1) * geometry.patch_size[0], (columns + image.square_head) * geometry.patch_size[1]
    states = subject.run(subject.noise(other))
    expected = geometry.prefix_tokens + (rows + 1) * (columns + image.square_head)
    if len(states) != expected or not torch.isfinite(states).all():
        raise SwapVerificationError(f"images of {other[0]} x {other[1]} pixels give {len(states)} states, not finite.")
    return f"{other[0]} x {other[1]} pixels run, {len(states)} tokens"


def _unswapped(subject: _Subject, plan: SwapPlan, noise: float) -> str:
    from hf_posswap.patching.apply import unpatch_model

    if not subject.model._posswap.undo:
        return "not compared: the model was loaded swapped"
    geometry, scheme = subject.stack.geometry, plan.scheme
    assert geometry.image_size is not None
    pixels = subject.noise(geometry.image_size)
    swapped = subject.run(pixels)
    unpatch_model(subject.model)
    gap = float((swapped - subject.run(pixels)).abs().max())
    kept = isinstance(scheme, Learned2D) and scheme.grid(geometry) == geometry.grid()
    if kept and gap > noise:
        raise SwapVerificationError(f"{scheme} is the mechanism that the model had, but its states moved by {gap:.3g}.")
    if not kept and gap == 0:
        raise SwapVerificationError(f"{scheme}: the states are those of the unswapped model: nothing took effect.")
    return f"its states are {gap:.3g} away" + (", as they should be: an identity" if kept else "")


def _size(pixels: Tensor) -> Size:
    return pixels.shape[-2], pixels.shape[-1]
