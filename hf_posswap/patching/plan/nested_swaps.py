"""Refusing a second swap if a submodel, or an outer model, is already swapped."""

from __future__ import annotations

from typing import Any

from hf_posswap.errors import AlreadyPatchedError
from hf_posswap.patching.record.model_class import is_part
from hf_posswap.patching.record.record import native_config_class


def refuse_nested_swaps(model: Any) -> None:
    """Refuse a `model` that contains a swapped submodel, or that belongs to a swapped outer model.

    Raises:
        AlreadyPatchedError: names the submodel, or says that the outer model carries a swap.
    """
    name = type(model).__name__
    inner = next((path for path, module in model.named_modules() if path and "_posswap" in vars(module)), None)
    if inner is not None:
        submodel: Any = model.get_submodule(inner)
        raise AlreadyPatchedError(
            f"{inner!r} of this {name} already carries {submodel._posswap.plan.named}: call "
            f"unpatch_model(model.get_submodule({inner!r})) first."
        )
    if "_posswap" in vars(model):
        return
    if is_part(model) or native_config_class(model.config) is not type(model.config):
        record = getattr(model.config, "posswap", None)  # a tower's config has none
        to = "" if record is None else f", to {record['scheme']['name']}"
        raise AlreadyPatchedError(
            f"this {name} is a part of a model that carries a swap{to}: call unpatch_model on the whole model first."
        )
