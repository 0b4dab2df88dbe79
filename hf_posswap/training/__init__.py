"""Recipes: settings, data, engine and dry runs; fits and searches for a start; swaps in other trainers."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
