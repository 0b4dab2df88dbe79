"""Model families: where positions live; importing this package registers them all."""

from hf_posswap.families import learned, learned_encoder_decoders, own_decoders, rotary
from hf_posswap.families.base import FAMILIES, Family, Sites, Stack, StackSpec, TableSpec, family_of, locate, register

__all__ = [
    "FAMILIES",
    "Family",
    "Sites",
    "Stack",
    "StackSpec",
    "TableSpec",
    "family_of",
    "learned",
    "learned_encoder_decoders",
    "locate",
    "own_decoders",
    "register",
    "rotary",
]
