"""EleutherAI's evaluation harness on swapped models: https://github.com/EleutherAI/lm-evaluation-harness."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
