"""Text and tokens; in the packages below, data, recipes and the engine that trains by them."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
