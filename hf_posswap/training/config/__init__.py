"""Recipes: YAML files that state their differences, read into frozen dataclasses, checked before anything loads."""

from hf_posswap.training.config.load import load_recipe, make_recipe
from hf_posswap.training.config.settings import (
    SENTENCES,
    ComputeSettings,
    GateSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    Recipe,
    SaveSettings,
    StageSettings,
    SwapSettings,
    WatchSettings,
)
from hf_posswap.training.config.stages import Phase, phases_of

__all__ = [
    "SENTENCES",
    "ComputeSettings",
    "GateSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "OptimizerSettings",
    "Phase",
    "Recipe",
    "SaveSettings",
    "StageSettings",
    "SwapSettings",
    "WatchSettings",
    "load_recipe",
    "make_recipe",
    "phases_of",
]
