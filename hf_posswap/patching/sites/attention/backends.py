"""Which way of computing attention is taken for a scheme: chosen in the open, and told by the plan.

All give the same numbers, but for rounding, and but for padding that sees nothing: the formula gives it a mean of all
values, the others zeros, as stock eager and stock sdpa do. "plain" is the formula under the model's own implementation,
and works everywhere; the others hold nothing of [Q, K], and are taken where they apply and the input is long enough to
gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_posswap.errors import NotPatchedError, OptionError, UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.flex import ByDistance, Penalty, fits_flex
from hf_posswap.kernels.merge import mergeable
from hf_posswap.patching.sites.attention.forward_memo import Span
from hf_posswap.patching.sites.attention.request import Request
from hf_posswap.patching.sites.attention.ways import WAYS
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.common.piece import Piece
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.devices import device_type

BACKENDS = {
    "row": "the bias as one number a key, in a fused kernel",
    "row_windowed": "the same, without the keys whose weight float32 cannot hold",
    "hankel": "the bias as one number a distance, in blocks of queries",
    "flex": "the bias read from positions, in compiled flex_attention",
    "chunked": "the bias made for a few queries at a time",
    "merge": "fused calls, joined by their softmax sums",
    "plain": "the scores as the formula has them",
}
SITUATIONS = "padded, packed or upon a cache too, unless masks have gaps or positions jump"
"""Where the first way of a scheme applies, in the words of a plan."""
MIN_QK_PAIRS = 2**18
"""Pairs of a query and a key in a row of the batch (512 x 512) from which "auto" leaves the plain way."""
MIN_FLEX_QK_PAIRS = 2**22
"""Pairs (2048 x 2048) from which "auto" takes flex on a GPU: it takes long to compile."""
LARGE_BIAS = 2**24
"""Numbers of a dense bias, 64 MiB, from which "auto" makes it in parts where only "chunked" applies."""
MOST_CALLS = 64
"""Chunks of a sequence up to which "auto" merges: each needs a call."""


def backends_of(mechanism: Mechanism) -> tuple[str, ...]:
    """Return the names of the ways that a mechanism may be computed in, the fastest first; none: as any attention.

    Example:
        >>> from hf_posswap.schemes.alibi import AlibiMechanism
        >>> backends_of(AlibiMechanism([0.25, 0.0625], interpolation=1.0))
        ('row', 'row_windowed', 'hankel', 'flex', 'chunked', 'plain')
    """
    if mechanism.splits:
        known = mechanism.splits_queries or (mechanism.regions is not None and mergeable(mechanism.regions))
        return ("merge", "plain") if known else ("plain",)
    if not mechanism.biases:
        return ()
    rows = ("row", "row_windowed") if mechanism.slopes is not None else ()
    return (*rows, *(("hankel", "flex") if mechanism.distance_only else ()), "chunked", "plain")


def choose(request: Request) -> str:
    """Return the name of the way to compute `request`: "plain" where no other one applies."""
    wanted, open_to = request.mechanism.backend, backends_of(request.mechanism)
    if wanted == "plain" or len(open_to) < 2 or request.is_plain():
        return "plain"
    names = [name for name in open_to if wanted in ("auto", name)]  # layers differ in what they are open to
    return next((name for name in names if _gains(name, request, wanted) and _applies(name, request)), "plain")


def _gains(name: str, request: Request, wanted: str) -> bool:
    """Return whether "auto" takes `name` at this size; a way that was asked for is taken at any."""
    if wanted != "auto" or name == "plain":
        return True
    if name == "row_windowed" or request.pairs < MIN_QK_PAIRS:
        return False
    if name == "flex":
        return device_type(request.query) == "cuda" and request.pairs >= MIN_FLEX_QK_PAIRS
    if name == "chunked" and request.mechanism.distance_only:  # else the bias is a network's, with more inside
        return request.query.shape[0] * request.query.shape[1] * request.pairs >= LARGE_BIAS
    if name == "merge" and not request.mechanism.splits_queries:
        assert request.mechanism.regions is not None
        return all(region.size == 1 or request.pairs <= (MOST_CALLS * region.size) ** 2
                   for region in request.mechanism.regions)  # fmt: skip
    return True


def _applies(name: str, request: Request) -> bool:
    """Return whether `name` is exact for this mask and these positions."""
    if device_type(request.query) != "cpu" and name not in ("flex", "merge", "plain"):
        return False  # the fused calls of a GPU take no bias
    if name in ("chunked", "plain"):
        return True
    if name == "flex":
        unmasked = request.mask is None and request.span.is_prefill
        return unmasked and fits_flex(request.query, request.value, request.read())
    division = request.division(name)
    if division is None:
        return False
    if device_type(request.query) != "cpu":
        return request.mask is None and request.span.is_prefill and not division.rest
    return division.gains or request.mechanism.backend == name


def attend(request: Request, pieces: Callable[[], tuple[Piece, ...]]) -> Tensor | None:
    """Return attention [B, Q, H, D] in the way that `choose` names; None: in the plain way, which is elsewhere.

    Args:
        request: the call.
        pieces: gives those of a mechanism that splits.
    """
    name = choose(request)
    if name == "plain":
        return None
    return WAYS[name](request, pieces).transpose(1, 2).contiguous()


def is_learned(mechanism: Mechanism) -> bool:
    """Return whether gradients of the mechanism's own parameters are wanted now."""
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in mechanism.parameters())


def flex_bias(mechanism: Mechanism, span: Span, batch: int) -> Penalty | ByDistance | None:
    """Return what flex_attention adds to its scores, for `batch` rows; any mask, any positions.

    None: the mechanism adds nothing, or needs the bias as a tensor, as it is no function of distance.
    """
    positions = span.query.expand(batch, -1), span.key.expand(batch, -1)
    if mechanism.slopes is not None:
        return Penalty(mechanism.slopes.to(span.query.device), *positions)
    if not mechanism.distance_only or torch.compiler.is_compiling():
        return None
    behind, ahead = (int((a.amax() - b.amin()).clamp(min=0)) for a, b in (positions, positions[::-1]))
    distances = torch.arange(-ahead, behind + 1, device=span.query.device)
    return ByDistance(mechanism.distance_bias(distances), ahead, *positions)


def set_backend(model: nn.Module, backend: str) -> None:
    """Say how the attention of a patched model is computed; the model's results stay the same, but for rounding.

    It holds for this model in this process: checkpoints do not keep it.

    Args:
        model: patched, or a PEFT model around one.
        backend: "auto" takes the fastest that applies to each call; "plain" the formula itself; "row",
            "row_windowed", "hankel", "flex", "chunked" or "merge" that one, at any length, and "plain" where it does
            not apply: all with dropout, for one query alone, in graphs that are exported, for a GPU, or of torch before
            2.7; all but "chunked" where a mask leaves gaps between the keys that a query sees, or positions jump;
            "flex" with a mask or a cache, and with gradients on a CPU.

    Raises:
        NotPatchedError: the model carries no scheme inside attention.
        OptionError: no such backend.
        UnsupportedSwapError: the scheme can never be computed so.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "alibi")
        >>> set_backend(model, "plain")
    """
    if backend != "auto" and backend not in BACKENDS:
        raise OptionError(f"no backend {backend!r}. There are: auto, {', '.join(BACKENDS)}.")
    mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
    if not mechanisms:
        raise NotPatchedError(
            f"{type(model).__name__} carries no scheme inside attention, so there is no backend to choose: patch it "
            "with hf_posswap.patch_model first; a native swap runs as stock transformers does."
        )
    known = list(dict.fromkeys(name for mechanism in mechanisms for name in backends_of(mechanism)))
    if backend not in ("auto", "plain", *known):
        raise UnsupportedSwapError(
            f"{type(model).__name__} cannot be computed by {backend!r}. Its scheme has: {', '.join(['auto', *known])}."
        )
    for mechanism in mechanisms:
        mechanism.backend = backend


def describe_backends(scheme: Scheme, geometry: Geometry) -> tuple[str, ...]:
    """Return in words how the attention of a stack is computed under `scheme`, where it is not the model's own."""
    mechanism = scheme.mechanism(geometry)
    layers = [mechanism.for_layer(layer) for layer in range(geometry.num_layers)]
    return tuple(dict.fromkeys(_way(layer) for layer in layers if backends_of(layer)))


def _way(mechanism: Mechanism) -> str:
    names = [name for name in backends_of(mechanism) if name != "row_windowed"]
    if names == ["plain"]:
        return f"plain: {BACKENDS['plain']}"
    rest = "chunked or plain" if "chunked" in names[1:] else "plain"
    least, of_flex = math.isqrt(MIN_QK_PAIRS), math.isqrt(MIN_FLEX_QK_PAIRS)
    if "flex" in names:
        rest = f"flex on a GPU, {of_flex} tokens and more; else {rest}"
    first = f"{names[0]}: {BACKENDS[names[0]]} (sdpa on a CPU, {least} tokens and more, {SITUATIONS})"
    return f"{first}; {'' if 'flex' in names else 'else '}{rest}; see set_backend"
