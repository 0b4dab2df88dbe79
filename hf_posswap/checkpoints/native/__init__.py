"""Swapped models as models of other stock classes of transformers that compute the same, exactly."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
