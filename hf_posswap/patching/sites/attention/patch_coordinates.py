"""Schemes inside the attention of models that see images: its modules are given the coordinates of the patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.edits.restore import keep_hooks, remove_hooks
from hf_posswap.patching.sites.attention.call import CALL_ARGUMENT, AttentionCall
from hf_posswap.patching.sites.attention.edits import PatchAttention
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemo, Span, identity_of
from hf_posswap.patching.sites.attention.hooks import PositionHook
from hf_posswap.schemes.common.places import places_of

COORDINATES = "posswap_coordinates"
"""Keyword argument by which attention modules are given the coordinates of their tokens."""


class CoordinatesHook:
    """Pre-hook of the module that takes the image: its attention modules are given the tokens' coordinates.

    Args:
        geometry: of the model.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        pixels = args[0] if args else kwargs["pixel_values"]
        grid = self.geometry.grid((pixels.shape[-2], pixels.shape[-1]))
        places = places_of(grid, self.geometry.prefix_tokens, pixels.device)
        return args, {**kwargs, COORDINATES: places}


@dataclass(frozen=True, kw_only=True)
class PassCoordinates(Edit):
    """Makes a module that takes images pass the coordinates of the tokens on to its attention modules.

    Attributes:
        entry: path of the module.
        geometry: of the stack.
    """

    entry: str
    geometry: Geometry

    def apply(self, model: Any, saved: Saved) -> None:
        module = model.get_submodule(self.entry)
        keep_hooks(saved, module.register_forward_pre_hook(CoordinatesHook(self.geometry), with_kwargs=True))

    def undo(self, model: Any, saved: Saved) -> None:
        remove_hooks(saved)

    def check(self, model: Any) -> str | None:
        hooks = pre_hooks(model.get_submodule(self.entry))
        passed = any(isinstance(hook, CoordinatesHook) for hook in hooks)
        return None if passed else "coordinates are not passed on to attention"

    def reload(self, model: Any) -> None:
        """Nothing: no stock class loads a scheme inside attention."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


class CoordinateHook(PositionHook):
    """Pre-hook of an attention module that is given coordinates: tells the attention function."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        memo = self.memos.now()
        call = AttentionCall(self.mechanism, _span(kwargs[COORDINATES], memo), memo, keys="raw")
        return args, {**{k: v for k, v in kwargs.items() if k != COORDINATES}, CALL_ARGUMENT: call}


def _span(places: Tensor, memo: ForwardMemo) -> Span:
    return memo.shared(
        identity_of(places), lambda shared_values: Span(places, places.shape[1], True, None, shared_values)
    )


@dataclass(frozen=True, kw_only=True)
class PatchImageAttention(PatchAttention):
    """Puts a scheme of coordinates between an attention module's projections and its attention implementation."""

    hook = CoordinateHook
