"""Initial values of learned schemes, which torch draws, so that the page needs them as data."""

from __future__ import annotations

import base64

import torch
from torch import Tensor

from hf_posswap.schemes import Fire, Kerple, T5Bias
from hf_posswap.schemes.common.bias import generator, uniform
from hf_posswap.schemes.t5_bias import buckets


def beginnings(heads: int) -> dict[str, object]:
    """Return the random initial values of KERPLE, FIRE and T5's bias for up to `heads` heads, in the order of drawing.

    For fewer heads each uses a prefix: KERPLE two numbers per head, FIRE its hidden layer and then a row and a number
    per head, T5 the table, bucket by bucket.
    """
    kerple, fire, t5 = Kerple(), Fire(), T5Bias()
    table = torch.empty(t5.num_buckets * heads).normal_(generator=generator(t5.seed))
    return {
        "kerple": packed(uniform(0.0, 1.0, (2 * heads,), generator(kerple.seed))),
        "fire": packed(uniform(-1.0, 1.0, (2 * fire.width + (fire.width + 1) * heads,), generator(fire.seed))),
        "t5": packed(table),
        "buckets": buckets(t5.num_buckets, t5.max_distance, causal=True)[t5.max_distance :].tolist(),
    }


def packed(values: Tensor) -> str:
    """Return `values` [N] as the base64 of their float32, little-endian.

    Example:
        >>> packed(torch.tensor([1.0]))
        'AACAPw=='
    """
    return base64.b64encode(values.float().numpy().astype("<f4").tobytes()).decode("ascii")
