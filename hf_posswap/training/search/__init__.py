"""Search for the scheme that suits one model: LongRoPE's divisors, the rotary pairs that matter, biases."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
