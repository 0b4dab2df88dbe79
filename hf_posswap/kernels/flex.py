"""Biases, and regions with rotations of their own, by flex_attention under any mask, without [Q, K] tensors.

Press et al. 2021, https://arxiv.org/abs/2108.12409, section 3; Raffel et al. 2020, https://arxiv.org/abs/1910.10683.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.compat.torch_dispatch import attend_with_sums, compile_errors, many_kinds, works_correctly
from hf_posswap.errors import BackendWarning
from hf_posswap.utils.devices import device_type, is_standing_for
from hf_posswap.utils.format import said_by

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

LEAST_WIDTH = 16
"""Minimum head dimension of flex_attention's kernels."""
_ONE_KERNEL: dict[str, bool | int] = {"FORCE_USE_FLEX_ATTENTION": True}
"""Below 128 queries a GPU would use the decoding kernel, which does not support that many grouped heads."""
_FEW_LOADS: dict[str, bool | int] = _ONE_KERNEL | {
    "fwd_BLOCK_M": 64,
    "fwd_BLOCK_N": 64,
    "fwd_num_stages": 1,
    "bwd_num_stages": 1,
}
"""What is read by distance, or of a mask, takes shared memory for each stage: an H100 has too little for three."""


class Penalty:
    """Indexable like a bias [B, H, Q, K], one number at a time: -slopes[h] |i - j|, in float32.

    Args:
        slopes: [H], float32.
        query: positions, [B, Q], less than 2^31 from those of keys: read in int32, which spills fewer registers.
        key: positions, [B, K].
    """

    def __init__(self, slopes: Tensor, query: Tensor, key: Tensor) -> None:
        self.slopes, self.query, self.key = slopes, query.int(), key.int()

    def __getitem__(self, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        batch, head, row, column = index
        return -self.slopes[head] * (self.query[batch, row] - self.key[batch, column]).abs()


class ByDistance:
    """Indexable like a bias [B, H, Q, K], one number at a time: line[h, i - j + ahead], in float32.

    Args:
        line: [H, N], for the distances -ahead to N - 1 - ahead, which include those of all queries and keys.
        ahead: maximum distance of a key ahead of a query.
        query: positions, [B, Q], less than 2^31 from those of keys: read in int32, which spills fewer registers.
        key: positions, [B, K].
    """

    def __init__(self, line: Tensor, ahead: int, query: Tensor, key: Tensor) -> None:
        self.line, self.query, self.key = line, (query + ahead).int(), key.int()

    def __getitem__(self, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        batch, head, row, column = index
        return self.line[head, self.query[batch, row] - self.key[batch, column]]


def attend_read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Penalty | ByDistance,
    *,
    scaling: float,
    causal: bool,
    shown: BlockMask | None = None,
) -> Tensor:
    """Return attention [B, H, Q, D] with a bias that compiled flex_attention reads while it computes the scores.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D], G a divisor of H.
        value: [B, G, K, D].
        bias: indexed by [B, H, Q, K]; on a GPU its tensors may need gradients.
        scaling: multiplies the scores.
        causal: whether query i sees only the keys up to i, where `shown` is None.
        shown: the mask, by `shown_blocks`; a query that it shows no key gets zeros. None: there is none but causality.
    """

    def modified(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + bias[batch, head, row, column]

    if (
        is_standing_for()
    ):  # nothing is compiled for fake tensors; this needs as much memory, except for the gradient of the bias
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal and shown is None, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    from torch.nn.attention.flex_attention import flex_attention

    blocks = shown
    if shown is None and causal:
        blocks = past_blocks(query.shape[2], key.shape[2], query.device)
    return _run(
        _name(shown is not None), flex_attention, query, key, value, score_mod=modified, block_mask=blocks,
        scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=_ONE_KERNEL if shown is None else _FEW_LOADS,
    )  # fmt: skip


SETTLED = "flex_attention with a settled bias"
REGIONS = "flex_attention by regions"
CHUNK_REGIONS = "flex_attention by regions of chunks"
MASKED_REGIONS = "flex_attention by regions of a mask"
"""Kernels of several calls, joined by their sums, which need a GPU."""


def _name(masked: bool) -> str:
    return f"flex_attention{' with a mask' if masked else ''}"


class NotCompiledError(Exception):
    """torch.compile made no code for a call; `fits_flex` and `fits_joined` say no from then on."""


_refused: set[tuple[str, str]] = set()
"""Kernels, by name, and devices."""


def _run(kernel: str, function: Callable[..., Tensor], query: Tensor, *arguments: object, **options: object) -> Tensor:
    """Return what the compiled `function` gives.

    Raises:
        NotCompiledError: it is not compiled for these arguments: other shapes were, when it was tried.
    """
    device = query.device.type
    try:
        with many_kinds():
            return _compiled(function, device)(query, *arguments, **options)
    except compile_errors() as problem:
        _refused.add((kernel, device))
        warnings.warn(
            f"torch {torch.__version__} does not compile hf_posswap's {kernel} for queries {list(query.shape)} on "
            f"{device} ({type(problem).__name__}: {said_by(problem)[:300]}). The plain paths are used instead: the "
            "same results, slower and with more memory.",
            BackendWarning,
            stacklevel=2,
        )
        raise NotCompiledError(kernel) from problem


def attend_settled(query: Tensor, key: Tensor, value: Tensor, line: Tensor, *, scaling: float) -> Tensor:
    """Return causal attention [B, H, Q, D] with the bias line[h, min(i - j, N)] by compiled flex_attention.

    Few keys of a query are nearer than N. The bias of all others is one number, which is added to the logarithm of the
    sum of their exp(score): so no number is read for them, which takes five times as long as the rest.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D], as many as queries; G a divisor of H.
        value: [B, G, K, D].
        line: [H, N + 1], float32, which may need gradients.
        scaling: multiplies the scores.
    """
    if is_standing_for():
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    rows, settled = query.shape[2], -(-(line.shape[1] - 1) // BLOCK) * BLOCK
    near = past_blocks(rows, rows, query.device, 0, settled)
    far = past_blocks(rows, rows, query.device, settled)
    return _run(SETTLED, _near_and_far, query, key, value, line, near, far, scaling)


def _near_and_far(
    query: Tensor, key: Tensor, value: Tensor, line: Tensor, near: BlockMask, far: BlockMask, scaling: float
) -> Tensor:
    # a number that differs between calls is a symbol in generated code, which torch 2.11 does not compile there
    last = torch.full((), line.shape[1] - 1, dtype=torch.int32, device=line.device)

    def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + line[head, torch.minimum((row - column).clamp(min=0), last)]

    grouped = query.shape[1] != key.shape[1]
    nearby, sums = attend_with_sums(
        query, key, value, score_mod=biased, block_mask=near, scale=scaling, enable_gqa=grouped,
        kernel_options=_FEW_LOADS,
    )  # fmt: skip
    distant, distant_sums = attend_with_sums(
        query, key, value, block_mask=far, scale=scaling, enable_gqa=grouped, kernel_options=_ONE_KERNEL
    )
    weight = torch.sigmoid(distant_sums + line[:, -1:] - sums)[..., None]  # [B, H, Q, 1], 0 where none is far
    return (nearby.float() + weight * (distant.float() - nearby.float())).to(query.dtype)


def attend_by_regions(
    kernel: str, pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, blocks: Sequence[BlockMask], *, scaling: float
) -> Tensor:
    """Return attention [B, H, Q, D], each region with its own rotation, by compiled flex_attention.

    Args:
        kernel: `REGIONS`, `CHUNK_REGIONS` or `MASKED_REGIONS`.
        pairs: for each region query [B, H, Q, D] and key [B, G, K, D], rotated.
        value: [B, G, K, D].
        blocks: for each region the mask of its pairs: no pair is in two. A query that they show no key gets zeros.
        scaling: multiplies the scores.
    """
    (query, key), *others = pairs
    if is_standing_for():
        return functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    options = _ONE_KERNEL if kernel == REGIONS else _FEW_LOADS
    return _run(kernel, _by_regions, query, key, tuple(others), value, tuple(blocks), scaling, options)


def _by_regions(
    query: Tensor,
    key: Tensor,
    others: tuple[tuple[Tensor, Tensor], ...],
    value: Tensor,
    blocks: tuple[BlockMask, ...],
    scaling: float,
    options: dict[str, bool | int],
) -> Tensor:
    joined, total = None, None
    for (turned_query, turned_key), block_mask in zip(((query, key), *others), blocks, strict=True):
        out, sums = attend_with_sums(
            turned_query, turned_key, value, block_mask=block_mask, scale=scaling,
            enable_gqa=query.shape[1] != value.shape[1], kernel_options=options,
        )  # fmt: skip
        out, sums = out.float(), sums.clamp(min=_NO_SUM)
        if joined is None or total is None:
            joined, total = out, sums
            continue
        joined = joined + torch.sigmoid(sums - total)[..., None] * (out - joined)
        total = torch.logaddexp(total, sums)
    assert joined is not None
    return joined.to(query.dtype)


_NO_SUM = -1e30
"""The logarithm of a sum of nothing: finite, so that a query without any key has gradients of zero."""


@functools.cache
def _compiled(function: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    # for a second length torch 2.13 generates dynamic code, which does not compile on a CPU
    return torch.compile(function, dynamic=False if device == "cpu" else None)


BLOCK = 128
"""Queries, and keys, of a block of a mask."""


@functools.lru_cache(maxsize=16)
def past_blocks(
    rows: int,
    columns: int,
    device: torch.device,
    low: int = 0,
    high: int | None = None,
    *,
    size: int = 1,
    start: int = 0,
) -> BlockMask:
    """Return the mask of the keys up to each query at distances from `low` to below `high`, from bounds of blocks.

    `create_block_mask` would hold all of [Q, K].

    Args:
        rows: queries.
        columns: keys.
        device: for its numbers.
        low: the shortest distance, 0 or more.
        high: the one after the longest; None: there is no bound.
        size: tokens of a chunk; above 1 the bounds are distances of chunks.
        start: position of the first query, and of the first key, where there are chunks.
    """
    with torch.device(device):
        chunk = (torch.arange(start, start + max(rows, columns)) // size).int()
        row, column = torch.arange(0, rows, BLOCK)[:, None], torch.arange(0, columns, BLOCK)
    last_row, last_column = (row + BLOCK).clamp(max=rows) - 1, (column + BLOCK).clamp(max=columns) - 1

    def near_enough(row: Tensor, column: Tensor) -> Tensor:
        return (row - column >= low) if high is None else (row - column >= low) & (row - column < high)

    def seen_at(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return near_enough(row, column)

    def seen_by_chunk(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (row >= column) & near_enough(chunk[row], chunk[column])

    least, most = chunk[row] - chunk[last_column], chunk[last_row] - chunk[column]  # distances in a block
    seen = (last_row >= column) & (most >= low)  # [Q/128, K/128]
    # a block that the text ends in is never whole
    whole = (row >= last_column) & (least >= low) & (row + BLOCK <= rows) & (column + BLOCK <= columns)
    if high is not None:
        seen, whole = seen & (least < high), whole & (most < high)
    return _block_mask((seen & ~whole)[None], whole[None], (rows, columns), seen_at if size == 1 else seen_by_chunk)


def shown_blocks(mask: Tensor) -> BlockMask:
    """Return a mask [B or 1, 1, Q, K] (True: attend) as flex_attention takes it: it is read in its blocks alone.

    `create_block_mask` would hold numbers of eight bytes for each pair of a query and a key.
    """
    batch, _, rows, columns = mask.shape
    shown = mask[0, 0] if batch == 1 else mask[:, 0]

    def seen_at(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return shown[batch, row, column]

    def seen_in_all(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return shown[row, column]

    padded = functional.pad(mask[:, 0], (0, -columns % BLOCK, 0, -rows % BLOCK))
    count = padded.unflatten(2, (-1, BLOCK)).sum(-1, dtype=torch.int32)  # [B or 1, Q, K/128]
    count = count.unflatten(1, (-1, BLOCK)).sum(2, dtype=torch.int32)  # [B or 1, Q/128, K/128]
    whole = count == BLOCK**2  # a block that the text ends in is never whole
    return _block_mask((count > 0) & ~whole, whole, (rows, columns), seen_in_all if batch == 1 else seen_at)


def _block_mask(partly: Tensor, wholly: Tensor, lengths: tuple[int, int], seen_at: Callable[..., Tensor]) -> BlockMask:
    """Return the mask whose blocks [B or 1, Q/128, K/128] are seen in part, and as a whole; `seen_at` tells of pairs.

    `BlockMask.from_kv_blocks` makes the lists of each key's queries by vmap, which does not run in a graph's operator.
    """
    from torch.nn.attention.flex_attention import BlockMask

    (count, order), (whole_count, whole_order) = _listed(partly), _listed(wholly)
    (of_keys, rows), (whole_of_keys, whole_rows) = (_listed(blocks.transpose(1, 2)) for blocks in (partly, wholly))
    return BlockMask(
        seq_lengths=lengths, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=seen_at, kv_num_blocks=count, kv_indices=order,
        full_kv_num_blocks=whole_count, full_kv_indices=whole_order, q_num_blocks=of_keys, q_indices=rows,
        full_q_num_blocks=whole_of_keys, full_q_indices=whole_rows,
    )  # fmt: skip


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of `blocks` [B, Q/128, K/128] has, [B, 1, Q/128], and their indices first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def fits_flex(query: Tensor, value: Tensor, bias: Penalty | ByDistance | None, *, masked: bool = False) -> bool:
    """Return whether `attend_read` supports these arguments, with a mask or without, and is correct in this process."""
    device = device_type(query)
    if bias is None or device not in ("cpu", "cuda") or query.shape[-1] != value.shape[-1]:
        return False
    tensors = (query, value, bias.line if isinstance(bias, ByDistance) else bias.slopes)
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if query.shape[-1] < LEAST_WIDTH or query.dtype == torch.float64 or (device == "cpu" and differentiated):
        return False  # flex_attention has no gradient on a CPU
    if (_name(masked), device) in _refused:
        return False
    return is_standing_for() or flex_available(device, differentiated, masked)


def fits_joined(kernel: str, query: Tensor, key: Tensor, value: Tensor, *, learned: bool = False) -> bool:
    """Return whether the calls of `SETTLED` and the like support these tensors, and are correct in this process.

    Args:
        kernel: `SETTLED`, `REGIONS`, `CHUNK_REGIONS` or `MASKED_REGIONS`.
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, Dv].
        learned: whether the bias wants gradients.
    """
    if device_type(query) != "cuda" or query.shape[-1] != value.shape[-1] or query.shape[-1] < LEAST_WIDTH:
        return False
    if (kernel, "cuda") in _refused:
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype == torch.float64:
        return False
    differentiated = learned or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)))
    return is_standing_for() or joined_available(kernel, "cuda", differentiated)


@functools.cache
def flex_available(device: str, differentiated: bool, masked: bool = False) -> bool:
    """Return whether compiled flex_attention works correctly on `device`; warn once if not.

    Its gradient is compiled and tried where it is wanted alone: it takes twice as long as the rest. So is a mask.
    """
    lengths = (300, 400) if masked else (160, 200)  # the second length triggers dynamic code, of which a CPU has none

    def errors(device: str) -> list[float]:
        tried = lengths[:1] if device == "cpu" else lengths
        return [error for length in tried for error in _errors(device, length, differentiated, masked=masked)]

    return works_correctly(_name(masked), device, errors)


@functools.cache
def joined_available(kernel: str, device: str, differentiated: bool) -> bool:
    """Return whether the calls of `kernel` work correctly on `device`; warn once if not. A CPU has no such calls."""

    def errors(device: str) -> list[float]:
        if kernel == SETTLED:
            return [error for length in (300, 400) for error in _errors(device, length, differentiated, settled=40)]
        return [error for length in (300, 400) for error in _errors_by_regions(kernel, device, length, differentiated)]

    return device == "cuda" and works_correctly(kernel, device, errors)


def _errors(
    device: str, length: int, learned: bool, settled: int | None = None, *, masked: bool = False
) -> list[float]:
    """Return the differences from the formula of `attend_read`, or `attend_settled`, and of its gradients.

    Args:
        device: its type.
        length: tokens.
        learned: whether gradients are compared.
        settled: the distance from which the bias stays the same; None: it does not.
        masked: whether one row begins with padding, which sees nothing, and one has a gap of a block and more.
    """
    source = torch.Generator("cpu").manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = (2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 16), (4, length)
    with torch.inference_mode(False), torch.set_grad_enabled(learned):
        drawn = [torch.randn(*shape, generator=source, device="cpu").to(device, dtype) for shape in shapes]
        leaves = [x.requires_grad_(learned) for x in (*drawn[:3], drawn[3].float())]
        query, key, value, line = leaves
        if settled is None:
            positions = torch.arange(length, device=device).expand(2, -1)
            read = ByDistance(line, 0, positions, positions)
            shown = shown_blocks(_padded(length, device)) if masked else None
            result = attend_read(query, key, value, read, scaling=0.3, causal=True, shown=shown)
        else:
            result = attend_settled(query, key, value, line[:, : settled + 1], scaling=0.3)
        expected = _formula(leaves[0], leaves[1], leaves[2], leaves[3], settled, masked=masked)
        return _differences(result, expected, leaves, learned=learned)


def _padded(length: int, device: str) -> Tensor:
    """Return a causal mask [2, 1, L, L]: one row begins with 5 tokens of padding, one has a gap of 257."""
    index = torch.arange(length, device=device)
    seen = torch.stack((index >= 5, (index < 3) | (index >= 260)))  # [2, L]
    return ((index[:, None] >= index) & seen[:, None])[:, None]


def _formula(
    query: Tensor, key: Tensor, value: Tensor, line: Tensor, settled: int | None, *, masked: bool = False
) -> Tensor:
    """Return causal attention with the bias line[h, i - j], or line[h, min(i - j, settled)], in float32."""
    keys, values = (x.float().repeat_interleave(2, dim=1) for x in (key, value))
    rows = torch.arange(query.shape[2], device=query.device)
    apart = rows[:, None] - rows[None]  # [Q, K]
    scores = query.float() @ keys.transpose(-1, -2) * 0.3 + line[:, apart.clamp(min=0, max=settled)]
    if not masked:
        return scores.masked_fill(apart < 0, -torch.inf).softmax(-1) @ values
    shown = _padded(len(rows), query.device.type)
    chances = scores.masked_fill(~shown, torch.finfo(torch.float32).min).softmax(-1)
    return chances.masked_fill(~shown, 0.0) @ values  # zeros for the padding, which sees nothing


def _errors_by_regions(kernel: str, device: str, length: int, learned: bool) -> list[float]:
    """Return the differences of `attend_by_regions`, and of its gradients, from the formula, as `_errors` does."""
    source = torch.Generator("cpu").manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size, bounds = (60, ((0, 1), (1, 2), (2, None))) if kernel == CHUNK_REGIONS else (1, ((0, 140), (140, None)))
    rows = torch.arange(length, device=device)
    shown = _padded(length, device)  # [2, 1, L, L]
    if kernel != MASKED_REGIONS:
        shown = (rows[:, None] >= rows).expand_as(shown)
    apart = rows[:, None] // size - rows // size
    regions = [(apart >= low) & (apart < (length if high is None else high)) for low, high in bounds]
    if kernel == MASKED_REGIONS:
        blocks = [shown_blocks(shown & region) for region in regions]
    else:
        blocks = [past_blocks(length, length, rows.device, low, high, size=size) for low, high in bounds]
    heads = [2, *(heads for _ in bounds for heads in (4, 2))]  # of the values, and of each region's queries and keys
    with torch.inference_mode(False), torch.set_grad_enabled(learned):
        leaves = [
            torch.randn(2, h, length, 16, generator=source, device="cpu").to(device, dtype).requires_grad_(learned)
            for h in heads
        ]
        value, *turned = leaves
        pairs = list(zip(turned[::2], turned[1::2], strict=True))
        result = attend_by_regions(kernel, pairs, value, blocks, scaling=0.3)
        scores = torch.full((), torch.finfo(torch.float32).min, device=device)
        for (query, key), region in zip(pairs, regions, strict=True):
            of_region = query.float() @ key.float().repeat_interleave(2, dim=1).transpose(-1, -2) * 0.3
            scores = torch.where(region & shown, of_region, scores)
        chances = scores.softmax(-1).masked_fill(~shown, 0.0)  # zeros for the padding, which sees nothing
        return _differences(result, chances @ value.float().repeat_interleave(2, dim=1), leaves, learned=learned)


def _differences(result: Tensor, expected: Tensor, leaves: Sequence[Tensor], *, learned: bool) -> list[float]:
    """Return the greatest difference of two results, and those of their gradients if `learned`, relative to sizes."""
    pairs = [(result, expected)]
    if learned:
        grads = (torch.autograd.grad(out.float().square().sum(), leaves) for out in (result, expected))
        pairs += [(a / b.abs().amax(), b / b.abs().amax()) for a, b in zip(*grads, strict=True)]
    return [float((a.detach().float() - b.detach().float()).abs().max()) for a, b in pairs]
