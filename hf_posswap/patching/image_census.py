"""Which classes of transformers that see images can be swapped, and how: found by planning, class by class."""

from __future__ import annotations

import importlib
from typing import Any

from hf_posswap.errors import PosswapError
from hf_posswap.families.base import FAMILIES
from hf_posswap.families.tiny import tiny_model
from hf_posswap.patching.plan import plan_swap
from hf_posswap.schemes.base import IMAGE_SCHEMES


def image_classes() -> list[str]:
    """Return the names of all classes of transformers that our families for images describe.

    Example:
        >>> "ViTForImageClassification" in image_classes()
        True
    """
    from transformers import CONFIG_MAPPING

    found = set()
    for _, family in FAMILIES.items():
        for model_type in family.model_types if any(part.image for part in family.parts) else ():
            home = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
            code = importlib.import_module(home)
            classes = {name: getattr(code, name) for name in code.__all__ if not name.endswith("PreTrainedModel")}
            found |= {name for name, cls in classes.items() if _type_of(cls) in family.model_types}
    return sorted(found)


def image_census() -> dict[str, dict[str, str]]:
    """Return the route of each scheme for images in each class of `image_classes`: "native", "plugin" or "no".

    Each class is built tiny, on the meta device, and swaps are planned for it; nothing is downloaded or run.

    Example:
        >>> image_census()["ViTModel"]["rope_2d"]
        'plugin'
    """
    import transformers

    found: dict[str, dict[str, str]] = {}
    for name in image_classes():
        model = tiny_model(getattr(transformers, name))
        found[name] = {scheme: _route(model, scheme) for scheme in IMAGE_SCHEMES}
    return found


def _route(model: Any, scheme: str) -> str:
    try:
        return plan_swap(model, scheme).route
    except PosswapError:
        return "no"


def _type_of(cls: Any) -> str | None:
    return getattr(getattr(cls, "config_class", None), "model_type", None)
