"""Recipes: YAML files that state their differences, read into frozen dataclasses, checked before anything loads."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
