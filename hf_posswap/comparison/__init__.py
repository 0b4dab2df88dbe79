"""Comparison of models on the same tokens: resumable, with intervals, significance tests and verdicts."""

from hf_posswap.utils.public_names import attach_public_names

__getattr__, __dir__, __all__ = attach_public_names(__name__, __file__)
