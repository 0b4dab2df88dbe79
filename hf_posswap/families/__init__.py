"""Model families: where positions live; importing this package registers them all."""

from hf_posswap.families import learned, rotary
from hf_posswap.families.base import FAMILIES, Family, Sites, TableSpec, family_of, locate, register

__all__ = ["FAMILIES", "Family", "Sites", "TableSpec", "family_of", "learned", "locate", "register", "rotary"]
