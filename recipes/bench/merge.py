"""Two and three rotations in one merged attention, compared with one causal attention and with blocked scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from hf_posswap.geometry import Geometry
from hf_posswap.kernels.merge import attend_regions
from hf_posswap.patching.sites.attention.split_attention import attend_split
from hf_posswap.schemes import DualChunk, ReRope, Scheme, SelfExtend
from recipes.bench.harness import Case, attention_inputs

SCALING = 0.125
ONE, EAGER = "sdpa, one rotation", "blocked scores"


def cases(smoke: bool) -> Iterator[Case]:
    """Yield the three schemes, with an original length of a quarter of the text."""
    for length in (64,) if smoke else (1024, 4096, 8192):
        for scheme in (SelfExtend(), ReRope(), DualChunk()):
            yield _case(scheme, length)


def _case(scheme: Scheme, length: int) -> Case:
    geometry = Geometry(768, 12, 12, 64, 12, length // 4, True, 64, "half", 10000.0, _frequencies())
    mechanism = scheme.resolve(geometry, length).mechanism(geometry)
    at = torch.arange(length)[None]
    q, k, v = attention_inputs(length)
    if mechanism.rotates:
        k = mechanism.rotate_key(k, mechanism.prepare(at, at.amax() + 1))
    pieces, regions = mechanism.pieces(at, at), mechanism.regions
    assert regions is not None

    def merged() -> Tensor:
        pairs = [(piece.rotate_query(q, 0, length), piece.rotate_key(k, 0, length)) for piece in pieces]
        return attend_regions(pairs, v, regions, scaling=SCALING)

    def blocked() -> Tensor:
        output, _ = attend_split(q, k, v, pieces, at, at, None, causal=True, scaling=SCALING)
        return output.transpose(1, 2)

    ways = {"ours": merged, ONE: lambda: sdpa(q, k, v, is_causal=True), EAGER: blocked}
    goals = {ONE: 1.3, EAGER: 1 / 6} if length >= 4096 else {}
    repetitions = 7 if length < 8192 else 3  # the blocked scores take half a minute a turn there
    return Case(f"{scheme.name}, {length}", ways, goals, unlike=frozenset({ONE}), repetitions=repetitions)


def _frequencies() -> tuple[float, ...]:
    from hf_posswap.rope_math import default_inv_freq

    return tuple(default_inv_freq(10000.0, 64).tolist())
