"""The private methods by which transformers and torch fill and load models, under public names.

All are alike in transformers 5.14 to 5.23 and torch 2.6 to 2.13.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from torch import nn


class LoadingHooks:
    """Mixin before a transformers model class that changes how its weights are initialized and loaded."""

    def posswap_fill(self, module: nn.Module) -> bool:
        """Initialize `module`, a submodule of the model; return whether it was initialized.

        Touches `PreTrainedModel._init_weights`, which the stock class gets where this returns False. Without it
        modules that a swap adds would be uninitialized, or initialized as tables.
        """
        return False

    def posswap_read(self, state: dict[str, Any], prefix: str, metadata: Any) -> Any:
        """Change, in place, the weights in `state` below `prefix` that the model is about to take.

        Touches `Module._load_from_state_dict`. Without it a marked state dict could not be loaded.

        Args:
            state: the state dict, of this model and maybe others.
            prefix: of the model's names in it.
            metadata: torch's metadata of this module.

        Returns:
            The metadata to use.
        """
        return metadata

    @classmethod
    def posswap_conversions(cls, model: Any) -> list[Any]:
        """Return further weight conversions for loading `model`; saving does not undo them.

        Touches `PreTrainedModel._load_pretrained_model`, `weight_mapping` of its `LoadStateDictConfig`, and
        `_weight_conversions` of the loaded model, which saving undoes. Without it marked weights would not be loaded.
        """
        return []

    @classmethod
    def posswap_loaded(cls, model: Any) -> None:
        """Settle what loading `model` left otherwise than it was: it makes every floating weight trainable.

        Touches `PreTrainedModel._load_pretrained_model`. Without it a formula's table could be trained after loading.
        """

    def _init_weights(self, module: nn.Module) -> None:
        if not self.posswap_fill(module):
            super()._init_weights(module)  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        metadata = self.posswap_read(state_dict, prefix, metadata)
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)  # type: ignore[misc]

    @classmethod
    def _load_pretrained_model(cls, *args: Any, **kwargs: Any) -> Any:
        load: Any = super()._load_pretrained_model  # type: ignore[misc]
        given = inspect.signature(load).bind(*args, **kwargs)
        model, load_config = given.arguments["model"], given.arguments["load_config"]
        ours = cls.posswap_conversions(model)
        both = [*ours, *(load_config.weight_mapping or [])]  # a quantizer's may match every weight, and the first does
        given.arguments["load_config"] = dataclasses.replace(load_config, weight_mapping=both)
        loaded = load(*given.args, **given.kwargs)
        model._weight_conversions = [conversion for conversion in model._weight_conversions if conversion not in ours]
        cls.posswap_loaded(model)
        return loaded


def ignored_on_load(model: Any) -> list[str]:
    """Return the patterns of weights that `model` silently ignores in a checkpoint.

    Touches `PreTrainedModel._keys_to_ignore_on_load_unexpected`. Without it vLLM ignores weights whose names only
    look similar.
    """
    return sorted(model._keys_to_ignore_on_load_unexpected or ())


def ignore_on_load(model: Any, patterns: list[str]) -> None:
    """Make `model`, and no other of its class, ignore weights by `patterns` instead of its own.

    Touches `PreTrainedModel._keys_to_ignore_on_load_unexpected`, as `ignored_on_load` does.
    """
    model._keys_to_ignore_on_load_unexpected = patterns
