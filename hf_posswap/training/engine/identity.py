"""The identity of a training: recipe, launch, documents and base, so that no other training resumes from it."""

from __future__ import annotations

import json
from typing import Any

from hf_posswap.compat.transformers_models import without_origin
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.training.config import Recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.theirs import result_settings
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.utils.weights_digest import weights_digest


def identity_of(recipe: Recipe, launch: Launch) -> dict[str, Any]:
    """Return what in the recipe and the launch affects the trained weights."""
    identity = to_dict(recipe)
    for name in ("name", "out", "evaluation", "gates"):
        del identity[name]
    del identity["data"]["cache"]
    if not recipe.data.assistant_only_loss:  # runs from before this key, and the next two, resume
        del identity["data"]["assistant_only_loss"]
    for source in identity["data"]["sources"]:
        for name in (name for name in ("min_tokens", "upsample") if source[name] is None):
            del source[name]
    identity |= {"training": result_settings(recipe.training), "processes": launch.processes}
    return identity | ({"sharding": launch.sharding} if launch.sharding else {})


def base_identity(model: Any) -> dict[str, Any]:
    """Return the identity of the model that a training starts from: its config, and a digest of its weights.

    Args:
        model: as loaded, before the swap; adapters around it count.
    """
    config = json.loads(unwrap(model).config.to_json_string())
    return {"config of the base": without_origin(config), "weights of the base": weights_digest(model)}
