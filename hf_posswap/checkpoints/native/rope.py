"""Saying a rotary scheme in the config of a stock class, proved by building the class's rotary module."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from hf_posswap.checkpoints.native.parts import Layer, refuse
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.settings import EditConfig
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.rope_layout import permute_rows
from hf_posswap.schemes import RotaryScheme


def rotary_scheme(plan: SwapPlan) -> RotaryScheme:
    """Return the scheme of `plan` if a stock class may compute it at every length and with every cache.

    Raises:
        UnsupportedSwapError: it is not rotary, does more than rotate, or follows the length.
    """
    scheme = plan.scheme
    if not isinstance(scheme, RotaryScheme) or not scheme.only_rotates:
        refuse(f"it rotates queries and keys, and {scheme.name} does not do that alone")
    assert isinstance(scheme, RotaryScheme)
    if scheme.length_dependent:
        refuse(
            f"the angles of {scheme.name} follow the length, and stock classes keep keys rotated by those of an "
            "earlier one"
        )
    return scheme


def say_rope(model_class: Any, config: Any, plan: SwapPlan) -> Any:
    """Return `config` with the rope parameters that make a stock model compute the scheme of `plan`.

    Args:
        model_class: of transformers.
        config: of a model with plain rotation in the half-split layout, of the original length.
        plan: with a rotary scheme.

    Raises:
        UnsupportedSwapError: no rope type of transformers says it.
    """
    half = dataclasses.replace(rotary_scheme(plan), layout="half")
    with torch.device("meta"):
        skeleton = model_class(config)
    trial = plan_swap(skeleton, half, max_length=plan.max_length)
    if trial.route != "native":
        refuse(f"no rope type of transformers computes {plan.scheme.name} with these parameters")
    for edit in trial.edits:
        if isinstance(edit, EditConfig):
            setattr(config, edit.path, edit.value)
    return config


def in_layout(layer: Layer, scheme: RotaryScheme, geometry: Geometry, layout: Any) -> Layer:
    """Return `layer` with the rows of query and key in the order that the other layout has them."""
    here, width = scheme.filled("layout"), scheme.rotary_dim(geometry)
    if here == layout:
        return layer
    turned = {
        projection: {
            name: permute_rows(t, heads, width, here, layout) for name, t in getattr(layer, projection).items()
        }
        for projection, heads in (("query", geometry.num_heads), ("key", geometry.num_kv_heads))
    }
    return dataclasses.replace(layer, **turned)
