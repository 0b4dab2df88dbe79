"""Position schemes: those of a kind share a file, yours is one of its own; importing this package registers them all.

To write a scheme you need: `Scheme` or one of its bases (`RotaryScheme`, `ScaledRotary`, `TableScheme`, `GridTable`),
`Mechanism` for code inside attention (`RotaryMechanism`, `DistanceMechanism`), `Traits` for its guarantees, `Geometry`
for the shape of a model, and `SCHEMES`, where it registers. The module of the class is exported with checkpoints, so it
must import hf_posswap by `from hf_posswap... import`.

Example:
    >>> from dataclasses import dataclass
    >>> from typing import ClassVar
    >>> import torch
    >>> from hf_posswap.schemes import SCHEMES, DistanceMechanism, Geometry, Kind, Mechanism, Scheme, make_scheme
    >>> @SCHEMES.register("near")
    ... @dataclass(frozen=True)
    ... class Near(Scheme):
    ...     '''score - cost |i - j|, the same for every head.'''
    ...
    ...     name: ClassVar[str] = "near"
    ...     summary: ClassVar[str] = "one price for distance"
    ...     source: ClassVar[str] = "https://arxiv.org/abs/2108.12409"
    ...     kind: ClassVar[Kind] = "bias"
    ...
    ...     cost: float = 0.5
    ...
    ...     def mechanism(self, geometry: Geometry) -> Mechanism:
    ...         return NearMechanism(self.cost, geometry.num_heads)
    >>> class NearMechanism(DistanceMechanism):
    ...     def __init__(self, cost: float, heads: int) -> None:
    ...         super().__init__()
    ...         self.cost, self.heads = cost, heads
    ...
    ...     def distance_bias(self, distances: torch.Tensor) -> torch.Tensor:
    ...         return -self.cost * distances.abs().float().expand(self.heads, -1)  # [H, N]
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from hf_posswap import patch_model, swap_plan
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    >>> str(swap_plan(patch_model(model, "near", cost=2.0)).scheme)
    'near(cost=2.0)'
    >>> SCHEMES.remove("near")  # an example leaves no trace
"""

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.alibi import Alibi, Alibi2D
from hf_posswap.schemes.base import SCHEMES, Kind, Scheme, Traits, make_scheme, scheme_class, schemes_for
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.common.bias import DistanceMechanism
from hf_posswap.schemes.common.table import GridTable, TableScheme
from hf_posswap.schemes.dynamic import NTK, Dynamic, LongRope
from hf_posswap.schemes.functions import bias, query_scale, rotation
from hf_posswap.schemes.layered import Layered, PerLayer, RNoPE
from hf_posswap.schemes.learned import Learned, Learned2D
from hf_posswap.schemes.learned_bias import Fire, Kerple, T5Bias
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.nope import NoPE
from hf_posswap.schemes.p_rope import Cope, PRope
from hf_posswap.schemes.piecewise import DualChunk, LeakyReRope, ReRope, SelfExtend, String
from hf_posswap.schemes.rope import Rope, Rope2D, RotaryMechanism, RotaryScheme
from hf_posswap.schemes.scaled import Linear, Llama3, NTKByParts, Resonance, ResonanceYarn, ScaledRotary, Yarn
from hf_posswap.schemes.sinusoidal import Sinusoidal, Sinusoidal2D
from hf_posswap.schemes.sum import Native, SSMax, Sum, Together, native
from hf_posswap.schemes.xpos import XPos

__all__ = [
    "NTK",
    "SCHEMES",
    "Alibi",
    "Alibi2D",
    "Blend",
    "Cope",
    "DistanceMechanism",
    "DualChunk",
    "Dynamic",
    "Fire",
    "Geometry",
    "GridTable",
    "Kerple",
    "Kind",
    "Layered",
    "LeakyReRope",
    "Learned",
    "Learned2D",
    "Linear",
    "Llama3",
    "LongRope",
    "Mechanism",
    "NTKByParts",
    "Native",
    "NoPE",
    "PRope",
    "PerLayer",
    "RNoPE",
    "ReRope",
    "Resonance",
    "ResonanceYarn",
    "Rope",
    "Rope2D",
    "RotaryMechanism",
    "RotaryScheme",
    "SSMax",
    "ScaledRotary",
    "Scheme",
    "SelfExtend",
    "Sinusoidal",
    "Sinusoidal2D",
    "String",
    "Sum",
    "T5Bias",
    "TableScheme",
    "Together",
    "Traits",
    "XPos",
    "Yarn",
    "bias",
    "make_scheme",
    "native",
    "query_scale",
    "rotation",
    "scheme_class",
    "schemes_for",
]
