"""One command from nothing to a comparison: a real model, new position mechanisms, adapted, measured, saved."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
