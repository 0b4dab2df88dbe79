"""Text to windows: sources, mixture, packing, positions, masking; item i depends on the settings and i alone."""

from hf_posswap.training.data.build import TokenData, build_data
from hf_posswap.training.data.proof import prove_packing
from hf_posswap.training.data.settings import PACKINGS, DataSettings, Packing, Source
from hf_posswap.training.data.windows import Collate, TokenWindows, document_mask

__all__ = [
    "PACKINGS",
    "Collate",
    "DataSettings",
    "Packing",
    "Source",
    "TokenData",
    "TokenWindows",
    "build_data",
    "document_mask",
    "prove_packing",
]
