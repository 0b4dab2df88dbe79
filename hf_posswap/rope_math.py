"""Rotation of queries and keys: the arithmetic that every rotary scheme shares.

Angles are exact modulo a turn. Stock transformers multiplies positions and theta_i in float32, whose rounding grows
with the position: 2e-3 radians at 32 000 tokens, 0.06 at a million. Here theta_i is a whole number of 2^-64 turns, and
whole numbers multiply without rounding, overflowing just where a turn is complete. So cos and sin are within 5e-7 of
float64 at any position, and scores depend on distances alone, wherever in a text. Near the start, where stock's own
rounding is small, the two agree within it.

Stock's arithmetic is kept where equality with the stock model is promised: in models whose own rotary modules compute
(a swap that stock transformers can express), where a model's own rotation is applied again inside attention, and in a
blend that begins with it (`stock_cos_sin`). There angles err as stock's do.

Schemes that see far text coarsely rotate by positions in groups of so many tokens (`groups_of`). `permute_rows` turns a
model of half-split pairs into one of interleaved pairs, and back.

Shapes: B batch, Q length, H heads, D head dim, R rotary dim (R <= D, even).
Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 15.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_posswap.compat.torch_dispatch import works_correctly
from hf_posswap.compat.torch_tensors import is_fake, transforms_active
from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Layout
from hf_posswap.utils.devices import device_type, is_standing_for

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    class _Context(FunctionCtx):
        """What the forward keeps for the backward."""

        saved_tensors: tuple[Tensor, ...]
        layout: Layout


class _Frequencies(NamedTuple):
    inv_freq: Tensor
    attention_factor: float = 1.0
    precise: Tensor | None = None
    steps: Tensor | None = None


class Frequencies(_Frequencies):
    """Angles per position of each rotary pair, and the factor on cos and sin.

    All is in fields, none in `__dict__`: torch.export takes the tuples of a model apart and puts them together again.

    Attributes:
        inv_freq: radians per position, shape [R/2], float32, as stock transformers computes them.
        attention_factor: multiplies cos and sin, so attention logits change by its square.
        precise: the same angles in float64, where they are known; None: those of `inv_freq`.
        steps: `phase_step`, computed before; None: not yet.

    Example:
        >>> Frequencies(torch.tensor([0.5])).exact
        tensor([0.5000], dtype=torch.float64)
    """

    def _replace(self, **changes: Any) -> Frequencies:
        """Return them with other fields; another `inv_freq` comes without what was known of the old one."""
        known = {"precise": None, "steps": None} if "inv_freq" in changes else {}
        return super()._replace(**known | changes)

    @classmethod
    def of(cls, exact: Tensor, inv_freq: Tensor | None = None, attention_factor: float = 1.0) -> Frequencies:
        """Return frequencies that are known more precisely than float32.

        Args:
            exact: radians per position, [R/2], float64 where the device has it.
            inv_freq: the same in float32, as stock transformers computes them; None rounds `exact`.
            attention_factor: multiplies cos and sin.
        """
        return cls(exact.float() if inv_freq is None else inv_freq, attention_factor, exact)

    @property
    def exact(self) -> Tensor:
        """The angles used for rotation, radians per position, [R/2]: float64 if the device supports it."""
        return self.inv_freq.to(widest(self.inv_freq.device)) if self.precise is None else self.precise

    @property
    def phase_step(self) -> Tensor:
        """The same in 2^-64 of a turn, modulo a turn, [R/2]: int64, which overflows after exactly one turn."""
        if self.steps is not None:
            return self.steps
        turns = self.exact / (2 * math.pi)
        return ((turns - turns.round()) * 2.0**64).long()

    def to(self, device: torch.device | str) -> Frequencies:
        """Return them on `device`, with `exact` and `phase_step` precomputed."""
        exact, steps = self.exact.to(device, widest(device)), self.phase_step.to(device)
        return Frequencies(self.inv_freq.to(device), self.attention_factor, exact, steps)


def widest(device: torch.device | str) -> torch.dtype:
    """Return the widest floating dtype that `device` has: float64, on Apple's GPUs float32."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


_RADIANS = 2 * math.pi * 2.0**-64
"""Radians per phase step."""


class _Halves(NamedTuple):
    cos: Tensor
    sin: Tensor


class CosSin(_Halves):
    """cos and sin of every position and pair, half width: [B or 1, 1, Q, R/2], float32."""

    def wide(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the factors of x, and of x with its pairs swapped, in `rotate`: [B or 1, 1, Q, R] each, cached."""
        cache = self.__dict__
        if layout not in cache:
            cache[layout] = _wide(self.cos, self.cos, layout), _wide(-self.sin, self.sin, layout)
        return cache[layout]


def _wide(first: Tensor, second: Tensor, layout: Layout) -> Tensor:
    """Return [..., R] from the first and the second members of its pairs, [..., R/2] each."""
    return torch.cat((first, second), dim=-1) if layout == "half" else torch.stack((first, second), dim=-1).flatten(-2)


def default_inv_freq(base: float, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return theta_i = base^(-2i/dim) for i in 0..dim/2-1, shape [dim/2], on the CPU; in float32 equal to stock's.

    Example:
        >>> default_inv_freq(10000.0, 4)
        tensor([1.0000, 0.0100])
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").to(dtype) / dim  # [dim/2]
    return 1.0 / (base**exponents)


def temperature(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on cos and sin, 0.1 mscale ln(s) + 1: sqrt(1/t) of equation 22 in its paper.

    Source: Peng et al. 2023, https://arxiv.org/abs/2309.00071.

    Example:
        >>> round(temperature(16.0), 4)
        1.2773
    """
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def cos_sin(positions: Tensor, frequencies: Frequencies) -> CosSin:
    """Return cos and sin, times the attention factor, of `positions` [B or 1, Q]: always float32.

    Whole positions, of either sign, are exact modulo a turn; positions between tokens are multiplied in the widest
    dtype of their device.

    Example:
        >>> far = cos_sin(torch.tensor([[2**24 - 1]]), Frequencies(torch.tensor([1.0])))
        >>> abs(far.cos.item() - math.cos(2**24 - 1)) < 5e-7
        True
    """
    at = positions[:, None, :, None]  # [B, 1, Q, 1]
    if positions.is_floating_point():
        turns = at.to(widest(positions.device)) * (frequencies.exact / (2 * math.pi))
        angles = (turns - turns.round()).float() * (2 * math.pi)  # [B, 1, Q, R/2], in [-pi, pi]
    else:
        angles = (at * frequencies.phase_step).float() * _RADIANS  # overflow wraps around like an angle
    if frequencies.attention_factor == 1.0:
        return CosSin(angles.cos(), angles.sin())
    return CosSin(angles.cos() * frequencies.attention_factor, angles.sin() * frequencies.attention_factor)


def stock_cos_sin(positions: Tensor, frequencies: Frequencies) -> CosSin:
    """Return what `cos_sin` does by the arithmetic of stock transformers: positions times theta_i in float32.

    Example:
        >>> table = stock_cos_sin(torch.tensor([[3]]), Frequencies(torch.tensor([0.1])))
        >>> bool(table.cos == (torch.tensor(3.0) * torch.tensor(0.1)).cos())
        True
    """
    angles = positions[:, None, :, None].float() * frequencies.inv_freq  # [B, 1, Q, R/2]
    cos, sin = angles.cos(), angles.sin()
    factor = frequencies.attention_factor
    return CosSin(cos, sin) if factor == 1.0 else CosSin(cos * factor, sin * factor)


def rotate(x: Tensor, table: CosSin, layout: Layout) -> Tensor:
    """Rotate the first R of D dimensions of `x` [B, H, Q, D] by the angles of `table`; the rest passes.

    The arithmetic is done in the wider of x's dtype and float32, the result has x's dtype. In float32 it equals
    `q * cos + rotate_half(q) * sin` of transformers bit by bit.

    Example:
        >>> x = torch.tensor([[[[1.0, 0.0]]]])  # B = H = Q = 1, D = 2
        >>> quarter = Frequencies(torch.tensor([torch.pi / 2]))
        >>> rotate(x, cos_sin(torch.tensor([[1]]), quarter), "half").round().abs()
        tensor([[[[0., 1.]]]])

        "dog" and "pig", each rotated by its position. The norms do not change, and their product depends only on the
        distance: positions 1 and 4 give the same as 101 and 104, but not the same as 4 and 1.

        >>> words = {"dog": torch.tensor([1.0, 0.2, 0.0, 0.5]), "pig": torch.tensor([0.9, 0.0, 0.3, 0.1])}
        >>> def at(word, place):
        ...     turns = cos_sin(torch.tensor([[place]]), Frequencies(default_inv_freq(10000.0, 4)))
        ...     return rotate(words[word][None, None, None], turns, "interleaved")[0, 0, 0]
        >>> round(float(words["dog"].norm()), 4), round(float(at("dog", 57).norm()), 4)
        (1.1358, 1.1358)
        >>> [round(float(at("dog", i) @ at("pig", j)), 4) for i, j in ((1, 4), (101, 104), (4, 1))]
        [-0.8111, -0.8111, -0.8709]

        The same from the formula: the first pair turns by an angle of 1 a token, the second by 0.01.

        >>> first = 0.9 * math.cos(3) + 0.18 * math.sin(3)  # (q1 k1 + q2 k2) cos + (q2 k1 - q1 k2) sin
        >>> round(first + 0.05 * math.cos(0.03) + 0.15 * math.sin(0.03), 4)
        -0.8111
    """
    if not _is_plain(x, table):
        return _joined(x, *table, layout)
    if x.numel() < LARGE:
        return _swapped(x, table, layout)
    in_place = x.dtype == table.cos.dtype == table.sin.dtype or _compiled or _fits_kernel(x, table)
    return _Rotation.apply(x, *table, layout) if in_place else _joined(x, *table, layout)


def _joined(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Return `rotate` of x, computed from its pair members."""
    width = 2 * cos.shape[-1]
    rotated, passed = x[..., :width], x[..., width:]
    first, second = _pair_members(rotated, layout)  # [B, H, Q, R/2] each
    turned = _wide(first * cos - second * sin, second * cos + first * sin, layout).to(x.dtype)
    return turned if passed.shape[-1] == 0 else torch.cat((turned, passed), dim=-1)


def _swapped(x: Tensor, table: CosSin, layout: Layout) -> Tensor:
    """Return `rotate` of x with the fewest calls, which dominate for few tokens: layers share the wide tables."""
    cos, sin = table.wide(layout)
    width = cos.shape[-1]
    rotated = x if width == x.shape[-1] else x[..., :width]
    if layout == "half":
        swapped = rotated.roll(width // 2, -1)
    else:
        swapped = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned = (rotated * cos + swapped * sin).to(x.dtype)
    return turned if rotated is x else torch.cat((turned, x[..., width:]), dim=-1)


def rotate_read(x: Tensor, table: CosSin, layout: Layout) -> Tensor:
    """Return `rotate` of x up to rounding, in fewer passes over it: of keys that each step of decoding reads again."""
    size = table.cos.shape[-1]
    fits = layout == "half" and x.shape[-1] == 2 * size and x.dtype == table.cos.dtype and x.device.type == "cpu"
    if not fits or not _is_plain(x, table) or (x.requires_grad and torch.is_grad_enabled()):
        return rotate(x, table, layout)
    turned = x * table.wide(layout)[0]
    turned[..., :size].addcmul_(x[..., size:], table.sin, value=-1)
    turned[..., size:].addcmul_(x[..., :size], table.sin)
    return turned


LARGE = 2**18
"""Elements of x from which `rotate` writes the result in place instead of concatenating."""


_compiled: Callable[[Tensor, Tensor, Tensor, Layout], Tensor] | None = None


def compile_rotation(on: bool = True) -> None:
    """Turn the compiled rotation kernel for large tensors on or off in this process; it is off by default.

    It reads and writes each element once, but takes seconds to compile, needs a C++ compiler or Triton, and its results
    may differ from transformers' in the last bit. Small tensors never use it, because the call costs more than it
    saves.

    Example:
        >>> compile_rotation(False)
    """
    global _compiled
    _compiled = torch.compile(_joined, dynamic=True, fullgraph=True) if on else None


def _is_plain(x: Tensor, table: CosSin) -> bool:
    """Return whether x may take the fast paths: nothing is traced, and only x is differentiated."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not (type(x) is Tensor or is_fake(x)):
        return False
    if transforms_active():  # torch.func needs the plain operations
        return False
    return not (table.cos.requires_grad or table.sin.requires_grad)


class _Rotation(torch.autograd.Function):
    """`rotate`, whose gradient is the inverse rotation: only the angles are saved for it."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        if _fits_kernel(x, CosSin(cos, sin)):
            return _by_kernel(x, cos, sin, layout)
        return (_compiled or _turned)(x, cos, sin, layout)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grad, cos, -sin, ctx.layout), None, None, None


def _fits_kernel(x: Tensor, table: CosSin) -> bool:
    """Return whether a GPU's one kernel supports these tensors, and is correct in this process."""
    if device_type(x) != "cuda" or not all(part.dtype == torch.float32 and part.stride(-1) == 1 for part in table):
        return False
    if x.dtype not in _KERNEL_DTYPES or is_fake(x) != is_standing_for():
        return False
    return is_standing_for() or kernel_available()


def _by_kernel(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    if is_standing_for():  # nothing runs for fake tensors; this needs as much memory
        return torch.empty_like(x)
    from hf_posswap.utils.rotation_kernel import rotated

    return rotated(x, cos, sin, interleaved=layout == "interleaved")


_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def kernel_available() -> bool:
    """Return whether this process has a GPU's rotation kernel, and it is correct; warn once if it is not.

    Example:
        >>> torch.cuda.is_available() or not kernel_available()
        True
    """
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return works_correctly("rotation kernel", "cuda", _kernel_errors)


def _kernel_errors(device: str) -> list[float]:
    """Return the differences of the kernel from `_joined`, with and without dimensions that pass."""
    source = torch.Generator("cpu").manual_seed(0)
    differences = []
    with torch.no_grad():
        for layout in LAYOUTS:
            for width in (16, 24):
                x = torch.randn(2, 33, 3, width, generator=source, device="cpu").to(device, torch.bfloat16)
                angles = torch.randn(1, 1, 33, 8, generator=source, device="cpu").to(device)
                given = x.transpose(1, 2), angles.cos(), angles.sin(), layout
                differences.append(_by_kernel(*given) - _joined(*given))
    return [float(each.abs().max()) for each in differences]


IN_CACHE = 3 * 2**16
"""Elements of x per block on a CPU: the block and its result fit into the cache."""
LEAST_TOKENS = 16
"""The fewest tokens per block."""


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Return `rotate` of x, in the memory layout of x."""
    width, tokens = 2 * cos.shape[-1], x.shape[-2]
    turned = torch.empty_like(x)
    turned[..., width:] = x[..., width:]
    rows = max(LEAST_TOKENS, IN_CACHE * tokens // x.numel())
    if device_type(x) != "cpu" or rows >= tokens or cos.shape[-2] != tokens:
        _turn_into(turned[..., :width], x[..., :width], cos, sin, layout)
        return turned
    for start in range(0, tokens, rows):
        some = (..., slice(start, start + rows), slice(width))
        _turn_into(turned[some], x[some], cos[some], sin[some], layout)
    return turned


def _turn_into(turned: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    """Write `rotate` of x [B, H, q, R] into `turned`."""
    # multiplying whole rows is faster than half rows
    both = torch.cat((cos, cos), dim=-1) if layout == "half" else cos.repeat_interleave(2, dim=-1)  # [B or 1, 1, q, R]
    torch.mul(x, both, out=turned)
    (first, second), (to_first, to_second) = (_pair_members(tensor, layout) for tensor in (x, turned))
    to_first -= second * sin
    to_second += first * sin


def _pair_members(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second members of all pairs in `x` [..., R]."""
    if layout == "half":
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x[..., 0::2], x[..., 1::2]


def groups_of(positions: Tensor, size: int) -> Tensor:
    """Return floor(positions / size), whole numbers of either sign.

    Not `positions // size`: where that is a loop's own index, and `size` is above 8 and does not divide the loop's
    length, inductor's code for a CPU (torch 2.13 to 2.15) cuts the loop into whole groups and leaves the rest of the
    result unwritten.

    Example:
        >>> groups_of(torch.tensor([-1, 0, 3, 4, 11]), 4)
        tensor([-1,  0,  0,  1,  2])
    """
    return torch.div(positions - positions % size, size, rounding_mode="trunc")


LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")


def permute_rows(weight: Tensor, heads: int, rotary_dim: int, source: Layout, target: Layout) -> Tensor:
    """Return the rows of a query or key projection, in `source` layout, in the order of `target` layout.

    A rotary pair lies at (i, i + R/2) of a head in the half-split layout and at (2i, 2i + 1) in the interleaved one.
    Scores are sums over pairs, so permuting the rows of the query and the key projection alike turns a model of the one
    layout into one of the other that computes the same.

    To turn a half-split model into an interleaved one, permute the weight (and bias) of `q_proj` with the query heads
    and of `k_proj` with the key heads, from "half" to "interleaved", and
    `patch_model(model, "rope", layout="interleaved")`.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.4.2.

    Args:
        weight: [H D, E] of a Linear, or its bias or a norm's weight [H D]; heads one after the other.
        heads: H of the query projection, G of the key projection.
        rotary_dim: R, the rotated dimensions of a head; the other D - R stay where they are.
        source: the current layout of the pairs.
        target: the layout to convert to.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        SchemeError: the rows cannot be divided among the heads, R does not fit a head, or no such layout.

    Example:
        >>> permute_rows(torch.arange(6), heads=1, rotary_dim=4, source="half", target="interleaved")
        tensor([0, 2, 1, 3, 4, 5])
    """
    for name, layout in (("source", source), ("target", target)):
        if layout not in LAYOUTS:
            raise SchemeError(f"permute_rows: {name} must be one of 'half', 'interleaved', got {layout!r}.")
    rows = weight.shape[0] if weight.dim() else 0
    if heads < 1 or not rows or rows % heads:
        raise SchemeError(
            f"permute_rows: needs a whole number of rows for each head, got shape {tuple(weight.shape)} and {heads} "
            "heads; give the key projection's own number of heads for its weight."
        )
    width = rows // heads
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > width:
        raise SchemeError(
            f"permute_rows: rotary_dim must be even, at least 2 and at most the {width} dimensions of a head, got "
            f"{rotary_dim}."
        )
    order = torch.arange(width, device=weight.device)
    if source != target:
        shape = (2, rotary_dim // 2) if source == "half" else (rotary_dim // 2, 2)
        order[:rotary_dim] = order[:rotary_dim].view(shape).T.flatten()
    return weight.unflatten(0, (heads, width))[:, order].flatten(0, 1)
