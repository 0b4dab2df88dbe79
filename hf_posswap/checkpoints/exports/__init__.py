"""What a checkpoint's positions become in other programs, and the config that each of them wants."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
