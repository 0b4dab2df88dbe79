"""Model families: where positions live; importing this package registers them all."""

from hf_posswap.families import (
    deberta,
    learned_decoders,
    learned_encoder_decoders,
    learned_encoders,
    own_bert_like,
    own_decoders,
    own_encoders,
    rotary,
    t5,
    tables_alone,
    vision,
)
from hf_posswap.families.base import FAMILIES, Family, StackSpec, TableSpec, register
from hf_posswap.families.locating import family_of, locate
from hf_posswap.families.sites import Sites, Stack

__all__ = [
    "FAMILIES",
    "Family",
    "Sites",
    "Stack",
    "StackSpec",
    "TableSpec",
    "deberta",
    "family_of",
    "learned_decoders",
    "learned_encoder_decoders",
    "learned_encoders",
    "locate",
    "own_bert_like",
    "own_decoders",
    "own_encoders",
    "register",
    "rotary",
    "t5",
    "tables_alone",
    "vision",
]
