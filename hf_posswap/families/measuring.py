"""The geometry of a model, read from its config and its modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.compat.transformers_attention import quarter_turn
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.families.base import ImageSpec, StackSpec, TableSpec
from hf_posswap.families.modules import join, modeling_module, table_at, tensor_at, who
from hf_posswap.families.rope_config import (
    buffer_name,
    factor_of,
    layer_config,
    parameters_of,
    reaching,
    rope_sets,
    rope_settings,
)
from hf_posswap.geometry import Geometry, Layout
from hf_posswap.rope_math import default_inv_freq

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def geometry_of(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    root: nn.Module,
    spec: StackSpec,
    attention: list[str],
    rotary: list[str],
    offset: int,
    still: tuple[int, ...] = (),
) -> Geometry:
    """Return the geometry of a stack of `model`.

    Args:
        model: of which the stack is a part.
        config: the part of its config that the stack was built from.
        root: the module that all paths start from.
        spec: the family's data about the stack.
        attention: paths of its attention modules.
        rotary: paths of its native rotary modules.
        offset: rows of its table before position 0.
        still: which of its attention modules, counted from 0, do not rotate.

    Raises:
        UnsupportedModelError: its layers differ, or its config has no length.
    """
    turning = reaching(rope_sets(root.get_submodule(rotary[0]))) if rotary else ("",)
    config, whole = layer_config(config, turning[0]), config
    kv_heads = None if spec.heads else getattr(config, "num_key_value_heads", None)
    own_width = _head_dim(whole, root, attention, turning[0]) if turning[0] else None
    if spec.traits is not None and spec.traits.heads is not None:
        heads, head_dim = spec.traits.heads(config)
    else:
        heads = getattr(config, spec.heads or "num_attention_heads")
        narrower = getattr(root.get_submodule(attention[0]), "attention_head_size", None)  # MobileBERT's
        head_dim = own_width or getattr(config, "head_dim", None) or narrower or config.hidden_size // heads
    length, width = _extent(model, config, root, spec, offset)
    rotation = {}
    if rotary:
        first, parameters = root.get_submodule(rotary[0]), _common(model, whole, turning)
        frequencies, factor = _own_angles(first, whole, turning[0])
        rotation = {
            "rotary_dim": 2 * getattr(first, buffer_name(turning[0])).shape[-1],
            "frequencies": frequencies,
            "attention_factor": factor,
            "base": float(parameters.get("rope_theta") or 10000.0),
            "layout": rotary_layout(root.get_submodule(attention[0])),
        }
        length = parameters.get("original_max_position_embeddings") or length
    inside = None if spec.traits is None else spec.traits.inside(config)
    if inside is not None and inside["name"] == "rope":
        rotary_dim = round(head_dim * inside["partial"])
        rotation |= {"rotary_dim": rotary_dim, "base": inside["base"], "layout": inside["layout"]}
        rotation["frequencies"] = tuple(default_inv_freq(inside["base"], rotary_dim).tolist())
    return Geometry(
        hidden_size=config.hidden_size,
        table_width=None if width == config.hidden_size else width,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=head_dim,
        num_layers=len(attention),
        original_length=length,
        causal=causal_of(model, config, root, spec, attention),
        sliding_window=_sliding_window(config, still),
        **rotation,
    )


def causal_of(
    model: PreTrainedModel, config: PreTrainedConfig, root: nn.Module, spec: StackSpec, attention: list[str]
) -> bool:
    """Return whether a query sees only its past."""
    if not getattr(config, "is_causal", True):  # transformers then makes a mask that shows both sides
        return False
    if spec.causal is not None:
        return spec.causal
    if spec.traits is not None and spec.traits.causal is not None:
        return spec.traits.causal(config)
    causal = {bool(getattr(root.get_submodule(path), "is_causal", True)) for path in attention}
    if len(causal) > 1:
        raise UnsupportedModelError(f"{who(model)}: some attention layers are causal and some are not.")
    return causal.pop()


def _extent(
    model: PreTrainedModel, config: PreTrainedConfig, root: nn.Module, spec: StackSpec, offset: int
) -> tuple[int, int]:
    """Return the original length of a stack, and the width of its table rows."""
    if spec.table is not None:
        rows, width = table_at(root, spec.table.path).shape  # type: ignore[union-attr]
        return (config.max_position_embeddings if spec.table.computed else rows - offset), width
    length = spec.length_in(config)
    if length is None:
        raise UnsupportedModelError(f"{who(model)}: its config has no length ({TableSpec.config_name}).")
    return length, config.hidden_size


def _common(model: PreTrainedModel, config: PreTrainedConfig, turning: tuple[str, ...]) -> dict[str, Any]:
    """Return the rope parameters of the layers that a rotary scheme replaces, which must be the same in all of them."""
    parameters = [parameters_of(config, name) for name in turning]
    if any(other != parameters[0] for other in parameters[1:]):
        raise UnsupportedModelError(
            f"{who(model)}: its layers of types {', '.join(turning)} see all tokens and rotate differently, so no "
            "single scheme can replace them."
        )
    return parameters[0]


def _head_dim(config: PreTrainedConfig, root: nn.Module, attention: list[str], rope_set: str) -> int | None:
    """Return the width of a head in the layers of one type, if their attention modules have it."""
    types = getattr(config, "layer_types", None) or []
    layers = [root.get_submodule(path) for path in attention]
    widths = {getattr(m, "head_dim", None) for m in layers if types[getattr(m, "layer_idx", 0)] == rope_set}
    return widths.pop() if len(widths) == 1 else None


def _sliding_window(config: PreTrainedConfig, still: tuple[int, ...]) -> int | None:
    """Return the most keys that a query sees, if all layers except the `still` ones have that limit."""
    types = {layer_type for i, layer_type in enumerate(getattr(config, "layer_types", None) or []) if i not in still}
    if types == {"chunked_attention"}:
        return config.attention_chunk_size
    window = getattr(config, "sliding_window", None)
    some_see_all = types - {"sliding_attention"}
    return None if some_see_all or getattr(config, "use_sliding_window", True) is False else window


def _own_angles(rotary: nn.Module, config: PreTrainedConfig, rope_set: str) -> tuple[tuple[float, ...] | None, float]:
    """Return theta_i of a set of the module `rotary`, and its factor on cos and sin; None where they follow the length.

    They are computed from the config, because a module on meta has none, and a module that was ever cast has lost
    digits, whatever its dtype now. If the module does not match its config, its own values are used.
    """
    name = buffer_name(rope_set)
    if any(each.follows_length for each in rope_settings(config) if each.layer_type == rope_set):
        return None, 1.0
    current = getattr(rotary, name)
    try:
        with torch.device("cpu"):
            exact = type(rotary)(config)
    except Exception:  # arbitrary model code, which may take other arguments
        exact = rotary
    if rounds(current, getattr(exact, name)):
        rotary, current = exact, getattr(exact, name)
    return tuple(current.detach().float().cpu().tolist()), factor_of(rotary, rope_set)


def rounds(current: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether the frequencies `current` may be a cast of `exact`, to float16 at worst; on meta, always.

    Example:
        >>> rounds(torch.tensor([0.75, 0.0]), torch.tensor([0.74989, 5e-8])), rounds(torch.ones(1), 2 * torch.ones(1))
        (True, False)
    """
    if current.shape != exact.shape:
        return False
    return not holds_values(current) or torch.allclose(
        current.float().cpu(), exact.float().cpu(), rtol=2**-7, atol=2**-24
    )


def rotary_layout(attention: nn.Module) -> Layout | None:
    """Return how the model's own code pairs rotary dimensions, detected by running it; None: unknown."""
    turned = quarter_turn(modeling_module(attention), torch.tensor([[1.0, 2.0, 3.0, 4.0]], device="cpu"))
    if turned is None:
        return None
    layouts: dict[tuple[float, ...], Layout] = {(-3, -4, 1, 2): "half", (-2, 1, -4, 3): "interleaved"}
    return layouts.get(tuple(turned.flatten().tolist()))


def image_geometry(
    model: nn.Module, config: PreTrainedConfig, root: nn.Module, spec: ImageSpec, attention: list[str], causal: bool
) -> Geometry:
    """Return the geometry of a vision stack.

    Args:
        model: of which the stack is a part.
        config: the part of its config that the stack was built from.
        root: the module that all paths start from.
        spec: the family's data about its images.
        attention: paths of its attention modules.
        causal: whether a query sees only its past.

    Raises:
        UnsupportedModelError: the table does not have one row per token.
    """
    table = tensor_at(root, join(spec.embeddings, spec.table))
    assert table is not None
    rows = table.shape[-2] if table.ndim > 1 else 0
    stride: Any = root.get_submodule(join(spec.embeddings, spec.patches)).stride
    geometry = Geometry(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        num_layers=len(attention),
        original_length=rows,
        causal=causal,
        image_size=pair(config.image_size),
        patch_size=pair(stride),
        prefix_tokens=spec.prefix,
    )
    high, wide = geometry.grid()
    if rows != high * wide + spec.prefix:
        raise UnsupportedModelError(
            f"{who(model)}: its table has {rows} rows where images of {config.image_size} pixels give {high} x {wide} "
            f"patches after {spec.prefix} other tokens. A swap of a model that this is a part of, or of a part of "
            "this one, may have left them: ask that model, or take the swap back."
        )
    return geometry


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width of a size that may be one number for both.

    Example:
        >>> pair(224), pair([224, 320])
        ((224, 224), (224, 320))
    """
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
