"""A swap as settings of the programs that load the unswapped model: what to paste into a server or a trainer."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
