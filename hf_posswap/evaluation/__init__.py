"""Measuring the effect of a swap: losses by length and position, use of context, needles, encoders, statistics."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
