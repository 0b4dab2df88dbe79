"""Text to windows: sources, mixture, packing, positions, masking; item i depends on the settings and i alone."""

from hf_posswap.training.data.build import TokenData, build_data
from hf_posswap.training.data.proof import prove_packing
from hf_posswap.training.data.settings import PACKINGS, DataSettings, Packing, Source

__all__ = ["PACKINGS", "DataSettings", "Packing", "Source", "TokenData", "build_data", "prove_packing"]
