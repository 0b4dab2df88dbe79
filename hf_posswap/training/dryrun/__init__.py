"""Recipes run dry: what they would hold and do, without weights, text or a GPU."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
