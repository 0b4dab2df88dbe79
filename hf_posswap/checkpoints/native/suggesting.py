"""Whether a checkpoint that needs hf_posswap could be a stock one, found from its config alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.native.convert import CONVERSIONS
from hf_posswap.errors import PosswapError
from hf_posswap.patching.apply.patch_model import swap_plan
from hf_posswap.patching.inspect.describe import model_class_of, read_config
from hf_posswap.patching.record.model_class import swapped_class

RUN_PLUGINS = ("transformers", "onnx", "torch", "sentence-transformers")
"""The programs that also run models that need hf_posswap, as they are."""


def stock_config(model: Any) -> tuple[PositionConfig, str] | None:
    """Return the positions of the first stock class that may compute the swapped `model`, and its name; None: none.

    It is not verified here: `posswap to-native` compares outputs before it writes.
    """
    for sources, build in CONVERSIONS.values():
        if sources is not None and model.config.model_type not in sources:
            continue
        try:
            blueprint = build(model, swap_plan(model))
        except (PosswapError, NotImplementedError, RuntimeError):  # not exact, or it needs the weights' values
            continue
        config, name = copy.copy(blueprint.config), str(blueprint.model_class.__name__)
        config.architectures = [name]  # as save_pretrained writes it
        return position_config_of(config), name
    return None


def stock_instead(folder: Path, *, in_memory: bool, trust_remote_code: bool = False) -> tuple[str, ...]:
    """Return a sentence that names the stock class which computes what the checkpoint in `folder` does, if one may.

    No weights are read, and nothing is proved: `to_native` does both.

    Args:
        folder: of the checkpoint.
        in_memory: whether it was saved there for the moment, of a model that the user has in memory.
        trust_remote_code: run code that it brings, where its config needs that.
    """
    if not (folder / "config.json").is_file():  # an adapter
        return ()
    config = read_config(folder, trust_remote_code=trust_remote_code)
    record = getattr(config, "posswap", None)
    if record is None or record.get("route") != "plugin":
        return ()
    name = _stock_class(config)
    if name is None:
        return ()
    how = "push hf_posswap.to_native(model)" if in_memory else f"posswap to-native {folder} -o OUT, then push OUT"
    return (f"A stock {name} computes the same, and needs no hf_posswap where it is loaded: {how}.",)


def _stock_class(config: Any) -> str | None:
    """Return the name of the stock class that the first exact conversion gives; None: there is none."""
    try:
        with torch.device("meta"):
            model = swapped_class(model_class_of(config))(copy.deepcopy(config))
    except Exception:  # code of any model, at values of any config: no more than a suggestion is lost
        return None
    for sources, build in CONVERSIONS.values():
        if sources is not None and config.model_type not in sources:
            continue
        try:
            blueprint = build(model, model._posswap.plan)
        except Exception:  # one that does not fit refuses; one that needs values of weights cannot say
            continue
        return str(blueprint.model_class.__name__)
    return None
