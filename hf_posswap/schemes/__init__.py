"""Position schemes: one file each; importing this package registers them all."""

from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.alibi_2d import Alibi2D
from hf_posswap.schemes.base import IMAGE_SCHEMES, SCHEMES, Mechanism, Scheme, Traits, make_scheme, scheme_class
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.dual_chunk import DualChunk
from hf_posswap.schemes.fire import Fire
from hf_posswap.schemes.grid_table import GridTable
from hf_posswap.schemes.kerple import Kerple
from hf_posswap.schemes.layered import Layered, PerLayer, RNoPE
from hf_posswap.schemes.learned import Learned
from hf_posswap.schemes.learned_2d import Learned2D
from hf_posswap.schemes.llama3 import Llama3
from hf_posswap.schemes.longrope import LongRope
from hf_posswap.schemes.nope import NoPE
from hf_posswap.schemes.ntk import NTK, Dynamic
from hf_posswap.schemes.ntk_by_parts import NTKByParts
from hf_posswap.schemes.p_rope import PRope
from hf_posswap.schemes.rerope import LeakyReRope, ReRope
from hf_posswap.schemes.resonance import Resonance, ResonanceYarn
from hf_posswap.schemes.rope import Rope, RotaryScheme
from hf_posswap.schemes.rope_2d import Rope2D
from hf_posswap.schemes.scaled import Linear, ScaledRotary
from hf_posswap.schemes.self_extend import SelfExtend
from hf_posswap.schemes.sinusoidal import Sinusoidal
from hf_posswap.schemes.sinusoidal_2d import Sinusoidal2D
from hf_posswap.schemes.t5_bias import T5Bias
from hf_posswap.schemes.table import TableScheme
from hf_posswap.schemes.together import Together
from hf_posswap.schemes.xpos import XPos
from hf_posswap.schemes.yarn import Yarn

__all__ = [
    "IMAGE_SCHEMES",
    "NTK",
    "SCHEMES",
    "Alibi",
    "Alibi2D",
    "Blend",
    "DualChunk",
    "Dynamic",
    "Fire",
    "GridTable",
    "Kerple",
    "Layered",
    "LeakyReRope",
    "Learned",
    "Learned2D",
    "Linear",
    "Llama3",
    "LongRope",
    "Mechanism",
    "NTKByParts",
    "NoPE",
    "PRope",
    "PerLayer",
    "RNoPE",
    "ReRope",
    "Resonance",
    "ResonanceYarn",
    "Rope",
    "Rope2D",
    "RotaryScheme",
    "ScaledRotary",
    "Scheme",
    "SelfExtend",
    "Sinusoidal",
    "Sinusoidal2D",
    "T5Bias",
    "TableScheme",
    "Together",
    "Traits",
    "XPos",
    "Yarn",
    "make_scheme",
    "scheme_class",
]
