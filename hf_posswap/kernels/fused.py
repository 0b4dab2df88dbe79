"""One fused attention call that also returns the logarithm of its softmax sums, and its gradient.

PyTorch's public `scaled_dot_product_attention` does not return those sums; the operators below it do, but they are
private. So they are looked up by name, and tested once in each process against the formula: if that fails, `available`
is False, and callers use the plain path.

Dao et al. 2022, https://arxiv.org/abs/2205.14135, algorithm 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_dispatch import (
    TOLERANCE,
    cudnn_attention,
    fused_attention,
    fused_attention_backward,
    fused_takes_groups,
    without_modes,
    works_correctly,
)
from hf_posswap.compat.torch_tensors import is_fake
from hf_posswap.utils.devices import attended_dtype, device_type, is_standing_for

DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}


def forward(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, Q, D] and the logarithm of each query's sum of exp(score) [B, H, Q].

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D], G a divisor of H.
        value: [B, G, K, D].
        scaling: multiplies the scores.
        causal: whether query i sees only the keys up to i.
        bias: added to the scaled scores, [1 or B, 1 or H, 1 or Q, K], of dtype `bias_dtype`; together with `causal`
            only the first visible key's may be -inf. On a GPU: None.
    """
    if device_type(query) == "cuda":
        assert bias is None, "the fused call of a GPU takes no bias"
        pairs, fits = query.shape[2] * key.shape[2], query.shape[-1] <= 128 and not is_standing_for()
        if pairs >= MIN_CUDNN_QK_PAIRS and fits and not is_fake(query) and cudnn_available(query.device):
            return _by_cudnn(query, key, value, scaling=scaling, causal=causal)
        out, sums, *_ = fused_attention("cuda")(query, key, value, 0.0, causal, False, scale=scaling)
        return out, sums[..., : query.shape[2]]
    has_tiny = bias is not None and _has_tiny_weights(bias, query.dtype)
    given = query, *_for_heads(query.shape[1], key, value * LARGER if has_tiny else value)
    out, sums = fused_attention("cpu")(*given, 0.0, causal, attn_mask=bias, scale=scaling)
    return (out.mul_(1 / LARGER) if has_tiny else out), sums


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    *,
    scaling: float,
    causal: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    `out` [B, H, Q, D] and `sums` [B, H, Q] may be those of a softmax over more keys than in this call; the gradients
    are then this call's share of the whole.
    """
    if device_type(query) == "cuda":
        assert bias is None, "the fused call of a GPU takes no bias"
        unread = torch.zeros(2, dtype=torch.int64, device=query.device)  # the random state of a dropout of 0
        given = grad.contiguous(), query, key, value, out.contiguous(), sums.contiguous()  # as the kernel assumes
        flash = fused_attention_backward("cuda")
        return flash(*given, None, None, query.shape[2], key.shape[2], 0.0, causal, unread, unread, scale=scaling)
    factor = None
    if bias is not None and _has_tiny_weights(bias, query.dtype):
        bias, grad, sums, factor = _without_tiny(bias, grad, query, key, sums, scaling)
    attend, settings = fused_attention_backward("cpu"), {"attn_mask": bias, "scale": scaling}
    to_query, *grads = attend(grad, query, *_for_heads(query.shape[1], key, value), out, sums, 0.0, causal, **settings)
    if factor is not None:
        to_query, *grads = (x.mul_(math.exp(-SHIFT)).mul_(1 / factor) for x in (to_query, *grads))
    groups = key.shape[1]  # heads that share a key have the sum of their gradients
    to_key, to_value = (x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2) for x in grads)
    return to_query, to_key, to_value


LARGER = 2.0**20
"""Factor on values that are multiplied by weights that may be tiny, which the result is divided by: an exact one."""
SHIFT = 64.0
"""By how much the logarithms of the sums are then smaller in the backward, where weights are e^64 times as large."""
STEEP = -40.0
"""Bias of a far pair from which its weight may be tiny."""
NEGLIGIBLE = -40.0
"""Logarithm of a weight, 4e-18, far below the precision of a sum of float32 weights that is 1."""
LOWEST = -1e30
"""Bias of such a weight, which is then exactly 0: -inf would make a query without keys NaN."""


def _has_tiny_weights(bias: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a bias [.., Q or 1, K] makes weights of far pairs so small that a CPU is slow with them.

    Below 1e-38 float32 has subnormal numbers, with which many CPUs are slow: `recipes.bench.bias` shows it in ALiBi's
    backward without windows. The corners of the bias tell: it is steepest between the farthest.
    """
    if dtype not in (torch.float32, torch.bfloat16) or is_fake(bias):
        return False
    corners = bias[..., :: max(1, bias.shape[-2] - 1), :: max(1, bias.shape[-1] - 1)]
    return bool(((corners < STEEP) & (corners > -torch.inf)).any())


def _without_tiny(
    bias: Tensor, grad: Tensor, query: Tensor, key: Tensor, sums: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return bias, grad, sums and a factor for a backward whose weights are 0 or larger than subnormal numbers.

    The bias is LOWEST where a weight is below e^NEGLIGIBLE, whatever the score. The others are e^SHIFT times as large;
    `grad` is multiplied by a power of two that makes its largest about 2^-10, so that e^64 times a sum is no overflow.
    """
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=bias.dtype) for x in (query, key)]  # [B, H, Q], [B, G, K]
    longest = norms[1].amax(-1).repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # [B, H]
    most = (abs(scaling) * norms[0] * longest[..., None] - sums)[..., None]  # [B, H, Q, 1]: of a weight's logarithm
    for dim in (0, 2):
        most = most if bias.shape[dim] > 1 else most.amax(dim, keepdim=True)
    # a query whose keys are all masked by the lowest number has a sum far below LOWEST
    low = torch.where((sums < LOWEST / 2) & (sums > -torch.inf), -torch.inf, LOWEST)[..., None]  # [B, H, Q, 1]
    for dim in (0, 2):
        low = low if bias.shape[dim] > 1 else low.amin(dim, keepdim=True)
    factor = 2.0 ** -(10 + max(-100, math.frexp(float(grad.abs().amax()))[1]))
    return torch.where(bias + most < NEGLIGIBLE, low.to(bias.dtype), bias), grad * factor, sums - SHIFT, factor


MIN_CUDNN_QK_PAIRS = 2**20
"""Pairs of a query and a key (1024 x 1024) from which a GPU's call is cuDNN's: it makes a plan for each shape."""


def _by_cudnn(query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, sums, *_ = cudnn_attention()(query, key, value, None, True, 0.0, causal, False, scale=scaling)
    return out, sums.reshape(query.shape[:3])  # [B, H, Q, 1] in some releases


@functools.cache
def cudnn_available(device: torch.device) -> bool:
    """Return whether cuDNN's attention is the fastest on a GPU (from Hopper on), and correct in this process.

    If not, the call is that of every GPU, with the same results.
    """
    if torch.cuda.get_device_capability(device)[0] < 9:
        return False
    try:
        with without_modes(), torch.autocast("cuda", enabled=False):
            return all(error <= TOLERANCE["cuda"] for error in _cudnn_errors(device))
    except Exception:  # any error means that it does not work here
        return False


def _cudnn_errors(device: torch.device) -> list[float]:
    """Return the differences from the formula, of the gradients by the other call from its results too."""
    source = torch.Generator(device="cpu").manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, device="cpu").to(device, torch.bfloat16)

    errors: list[float] = []
    with torch.inference_mode(False), torch.no_grad(), torch.device(device):
        for width, queries, causal in ((64, 128, True), (128, 128, True), (64, 96, False)):
            query, key, value = noise(2, 4, queries, width), noise(2, 2, 128, width), noise(2, 2, 128, width)
            grad = noise(2, 4, queries, width)
            case = {"causal": causal, "bias": None}
            errors += _case_errors(query, key, value, grad, case, _by_cudnn)
    return errors


def _for_heads(heads: int, *shared: Tensor) -> list[Tensor]:
    """Return each of `shared` [B, G, K, D] as the CPU's fused call needs it for `heads`, repeated if necessary."""
    if fused_takes_groups("cpu"):
        return list(shared)
    return [x.repeat_interleave(heads // x.shape[1], dim=1) for x in shared]


def bias_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a bias for queries of `dtype`: float32, or float64 for float64 queries.

    A large bias in bfloat16 would be off by whole units, not just by rounding.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the fused call supports such tensors, `as_attended`, and is correct in this process."""
    dtype, *others = map(attended_dtype, (query, key, value))
    same = query.shape[-1] == key.shape[-1] == value.shape[-1] and others == [dtype, dtype]
    device = device_type(query)
    if not same or device not in DTYPES or dtype not in DTYPES[device]:
        return False
    return (device == "cpu" or query.shape[-1] % 8 == 0) and (is_standing_for() or available(device))


@functools.cache
def available(device: str = "cpu") -> bool:
    """Return whether this PyTorch has a correct fused call on `device`; warn once if not."""
    return works_correctly("fused attention", device, _errors)


def _errors(device: str) -> list[float]:
    """Return the differences between the fused call and the formula, over the cases that the kernels use."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    source = torch.Generator(device="cpu").manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, device="cpu").to(device, dtype)

    with torch.inference_mode(False), torch.no_grad(), torch.device(device):
        query, key, value = noise(2, 4, 5, 8), noise(2, 2, 5, 8), noise(2, 2, 5, 8)
        row, dense, grad = noise(1, 4, 1, 5), noise(1, 4, 5, 5), noise(2, 4, 5, 8)
        cases: list[dict[str, object]] = [
            {"causal": True, "bias": None}, {"causal": False, "bias": None}
        ]  # fmt: skip
        if device == "cpu":
            cases += [{"causal": True, "bias": row}, {"causal": False, "bias": dense}]
        return [error for case in cases for error in _case_errors(query, key, value, grad, case)]


def _case_errors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    case: dict[str, Any],
    call: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> list[float]:
    settings = {"scaling": 0.4 if query.shape[-1] < 64 else query.shape[-1] ** -0.5, **case}
    given = {name: setting for name, setting in settings.items() if name != "bias" or call is None}
    out, sums = (call or forward)(query, key, value, **given)
    results = (out, sums, *backward(grad, query, key, value, out, sums, **settings))
    expected = _formula(query.float(), key.float(), value.float(), grad.float(), **settings)
    return [float((a.float() - b).abs().max()) for a, b in zip(results, expected, strict=True)]


def _formula(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, *, scaling: float, causal: bool, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Return out, sums and gradients by the formula."""
    share = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(share, dim=1) for x in (key, value))  # [B, H, K, D]
    scores = query @ keys.transpose(-1, -2) * scaling  # [B, H, Q, K]
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    probabilities = scores.softmax(-1)
    out = probabilities @ values
    change = probabilities * (grad @ values.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scaling  # of q k
    by_group = (
        change.transpose(-1, -2) @ query,
        probabilities.transpose(-1, -2) @ grad,
    )  # of each head's key and value
    shared = tuple(x.unflatten(1, (-1, share)).sum(2) for x in by_group)
    return out, scores.logsumexp(-1), change @ keys, *shared
