"""A probe of images: of noise, with its patches shuffled, and of another size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hf_posswap.errors import SwapVerificationError
from hf_posswap.families.modules import tensor_at
from hf_posswap.families.sites import PatchTable, Stack
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.edits.restore import device_of
from hf_posswap.patching.sites.embedding.patch_edits import AnyImageSize
from hf_posswap.patching.verify.probe import Expected, NoEffectSeen, Noise, Probe, gap
from hf_posswap.schemes.common.table import GridTable
from hf_posswap.schemes.learned import Learned2D

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Size = tuple[int, int]


@dataclass(frozen=True)
class PatchProbe(Probe):
    """Images of noise.

    Attributes:
        stack: that sees images.
        pixels: an image of the size that the swapped model's config says, [1, C, height, width], float32.
        other: one of another size.
        native: one of the size that the model was made for.
        order: a permutation of the patches of `pixels`, [R C].
    """

    outputs: ClassVar[str] = "states"
    stack: Stack
    pixels: Tensor
    other: Tensor
    native: Tensor
    order: Tensor

    def run(self, model: nn.Module) -> Tensor:
        return self._states(model, self.pixels)

    def again(self, model: PreTrainedModel) -> float:
        return gap(self.run(model), self.run(model))

    def moved(self, model: PreTrainedModel, noise: Noise) -> dict[str, str]:
        return {"order of patches": self._shuffled(model, noise), "other image size": self._other_size(model)}

    def expected(self, model: PreTrainedModel) -> Expected:
        scheme, geometry = applied_swap(model).plan.scheme, self.stack.geometry
        kept = isinstance(scheme, Learned2D) and scheme.grid(geometry) == geometry.grid()
        return "same" if kept else "different"

    def comparable(self, model: PreTrainedModel) -> Tensor:
        return self._states(model, self.native)

    def _states(self, model: Any, pixels: Tensor) -> Tensor:
        """Return the last hidden states of all tokens, [N, E], float32."""
        tower = model.get_submodule(self.stack.entry)
        out = tower(pixel_values=pixels.to(device_of(model), model.dtype), output_hidden_states=True)
        states = out.last_hidden_state if "last_hidden_state" in out else out.hidden_states[-1]  # of a backbone
        return states[0].float()

    def _shuffled(self, model: PreTrainedModel, noise: Noise) -> str:
        """Shuffle the patches: every mechanism must notice, but for one that knows no positions, which must not."""
        scheme, prefix = applied_swap(model).plan.scheme, self.stack.geometry.prefix_tokens
        tokens = torch.cat((torch.arange(prefix), self.order + prefix))
        states = self.run(model)
        moved = gap(states[tokens.to(states.device)], self._states(model, self.mixed()))
        result = f"shuffling the patches moves their states by {moved:.3g}"
        if scheme.kind == "none":
            if not noise.explains(moved):
                raise SwapVerificationError(f"{scheme}: {result}, and nothing should tell one patch from another.")
            return result
        if moved > noise.least:
            return result
        if isinstance(scheme, GridTable) and self._is_even(model):
            return f"{result}: the rows of the table are all the same until it is trained"
        raise NoEffectSeen(f"{scheme}: the states do not depend on the order of the patches ({moved:.3g}).")

    def mixed(self) -> Tensor:
        """Return the image with its patches in another order."""
        geometry = self.stack.geometry
        (high, wide), (rows, columns) = geometry.patch_size or (1, 1), geometry.grid(_size(self.pixels))
        cut = self.pixels[..., : rows * high, : columns * wide].clone()
        tiles = cut.unflatten(3, (columns, wide)).unflatten(2, (rows, high)).transpose(3, 4).flatten(2, 3)
        tiles = tiles[:, :, self.order]  # [1, C, R C, high, wide]
        mixed = self.pixels.clone()
        mixed[..., : rows * high, : columns * wide] = (
            tiles.unflatten(2, (rows, columns)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
        )
        return mixed

    def _is_even(self, model: nn.Module) -> bool:
        """Return whether the table gives each patch the same row."""
        table = tensor_at(model, self.stack.table_path or "")
        assert table is not None
        rows = table.flatten(0, -2)[self.stack.geometry.prefix_tokens :]
        return torch.equal(rows, rows[:1].expand_as(rows))

    def _other_size(self, model: PreTrainedModel) -> str:
        geometry, (high, wide) = self.stack.geometry, _size(self.other)
        states = self._states(model, self.other)
        rows, columns = geometry.grid((high, wide))
        if len(states) != geometry.prefix_tokens + rows * columns or not torch.isfinite(states).all():
            raise SwapVerificationError(f"images of {high} x {wide} pixels give {len(states)} states, not finite.")
        return f"{high} x {wide} pixels run, {len(states)} tokens"


def patch_probe(model: Any, seed: int) -> PatchProbe:
    """Return images of noise for a swapped `model`."""
    plan, generator = applied_swap(model).plan, torch.Generator().manual_seed(seed)
    stack, size = plan.sites.main, next(edit.native for edit in plan.edits if isinstance(edit, AnyImageSize))
    table, geometry = stack.table, stack.geometry
    assert isinstance(table, PatchTable)
    assert stack.spec.image is not None
    channels = model.get_submodule(table.embeddings).get_submodule(stack.spec.image.patches).in_channels
    rows, columns = geometry.grid(size)
    high, wide = geometry.patch_size or (1, 1)
    other = (rows + 1) * high, (columns + table.square_head) * wide

    def noise(of: Size) -> Tensor:
        return torch.randn(1, channels, *of, generator=generator)

    return PatchProbe(
        stack=stack,
        pixels=noise(size),
        other=noise(other),
        native=noise(geometry.image_size or size),
        order=torch.randperm(rows * columns, generator=generator),
    )


def _size(pixels: Tensor) -> Size:
    return pixels.shape[-2], pixels.shape[-1]
