"""The rotation of queries or keys as one Triton kernel, for a GPU: each element is read and written once.

In PyTorch's operators the same is nine kernels with temporaries in float32. `hf_posswap.rope_math` tries this one in
each process before it takes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, no_type_check

import torch
from torch import Tensor

_ELEMENTS = 2048
"""Pairs of a block."""
tl: Any = None
"""Triton's language, by the name that its kernels use, from the first call on."""


@functools.cache
def _kernel() -> Mapping[tuple[int], Callable[..., object]]:
    """Return `_rotate` for a GPU.

    Raises:
        ImportError: torch is a build without Triton.
    """
    global tl
    import triton
    import triton.language as tl

    return triton.jit(_rotate)


@no_type_check  # Triton reads annotations: of constants alone, by this name
def _rotate(
    x, out, cos, sin, heads, tokens, blocks,
    xb, xh, xq, xd, ob, oh, oq, od, cb, ch, cq, sb, sh, sq,
    HALF: tl.constexpr, PAIRS: tl.constexpr, PASSED: tl.constexpr, PASSED_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the rotation of a block of tokens of one head; b, h, q and d are strides."""
    place = tl.program_id(0)
    head = (place % heads).to(tl.int64)
    rest = place // heads
    batch = (rest // blocks).to(tl.int64)
    token = ((rest % blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    pair = tl.arange(0, PAIRS)[None]
    seen = (token < tokens) & (pair < HALF)
    c = tl.load(cos + batch * cb + head * ch + token * cq + pair, mask=seen)
    s = tl.load(sin + batch * sb + head * sh + token * sq + pair, mask=seen)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    read = x + batch * xb + head * xh + token * xq
    write = out + batch * ob + head * oh + token * oq
    a = tl.load(read + first * xd, mask=seen).to(tl.float32)
    b = tl.load(read + second * xd, mask=seen).to(tl.float32)
    tl.store(write + first * od, (a * c - b * s).to(out.dtype.element_ty), mask=seen)
    tl.store(write + second * od, (b * c + a * s).to(out.dtype.element_ty), mask=seen)
    if PASSED > 0:
        d = tl.arange(0, PASSED_WIDTH)[None]
        kept = (token < tokens) & (d < PASSED)
        tl.store(write + (2 * HALF + d) * od, tl.load(read + (2 * HALF + d) * xd, mask=kept), mask=kept)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Return `x` [B, H, Q, D] rotated, in its memory layout and dtype, by float32 arithmetic.

    Args:
        x: float32, bfloat16 or float16.
        cos: float32, [B or 1, H or 1, Q or 1, R/2], the last dimension contiguous.
        sin: the same.
        interleaved: whether the members of a pair lie side by side, not half of R apart.
    """
    batch, heads, tokens, width = x.shape
    half = cos.shape[-1]
    out = torch.empty_like(x)
    if not x.numel():
        return out
    tables = [table.expand(batch, heads, tokens, half) for table in (cos, sin)]
    pairs, passed = _power_of_two(half), width - 2 * half
    block = max(1, _ELEMENTS // pairs)
    blocks = -(-tokens // block)
    strides = [stride for table in tables for stride in table.stride()[:3]]
    with torch.cuda.device_of(x):  # Triton launches on the current one
        # without fusion to multiply-adds the results are those of PyTorch's operators, bit by bit
        _kernel()[(batch * heads * blocks,)](
            x, out, *tables, heads, tokens, blocks, *x.stride(), *out.stride(), *strides, HALF=half, PAIRS=pairs,
            PASSED=passed, PASSED_WIDTH=_power_of_two(passed), INTERLEAVED=interleaved, TOKENS=block,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not less than `number`."""
    return 1 << max(0, number - 1).bit_length()
