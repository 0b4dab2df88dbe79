"""Text to windows: sources, mixture, packing, positions, masking; item i depends on the settings and i alone."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
