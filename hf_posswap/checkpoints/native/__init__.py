"""Swapped models as models of other stock classes of transformers that compute the same, exactly."""

from hf_posswap.checkpoints.native.convert import CONVERSIONS, Native, convert, to_native

__all__ = ["CONVERSIONS", "Native", "convert", "to_native"]
