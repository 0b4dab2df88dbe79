"""Schemes in pieces against a matrix of relative positions, spelled out pair by pair in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posswap.errors import SchemeError
from hf_posswap.patching.sites.attention import split_attention as site
from hf_posswap.patching.sites.attention.split_attention import attend_split
from hf_posswap.rope_math import rotate
from hf_posswap.schemes import DualChunk, Dynamic, LeakyReRope, ReRope, SelfExtend, String
from tests.schemes.small import geometry

Relative = Callable[[int, int], float]


def self_extend(window: int, group: int) -> Relative:
    """Equations 3 and 4 of the paper: grouped positions, shifted to meet the window."""
    shift = window - window // group
    return lambda i, j: i - j if abs(i - j) < window else (i // group) - (j // group) + (shift if i > j else -shift)


def rerope(window: int) -> Relative:
    return lambda i, j: max(-window, min(i - j, window))


def leaky(window: int, slowdown: float) -> Relative:
    return lambda i, j: math.copysign(min(abs(i - j), window) + max(abs(i - j) - window, 0) / slowdown, i - j)


def string(shift: int, local: int) -> Relative:
    """Section 4 of the paper: distances from S on, S - W shorter."""
    return lambda i, j: i - j if abs(i - j) < shift else math.copysign(abs(i - j) - shift + local, i - j)


def dual_chunk(chunk: int, local: int) -> Relative:
    """Section 3 of the paper: intra-chunk, successive-chunk, inter-chunk attention; ahead by the text read backwards.

    Read backwards, a token at place n of its chunk stands at place size - 1 - n.
    """
    size = chunk - local

    def behind(back: int, query: int, key: int) -> float:
        if back == 0:
            return query - key
        if back == 1:
            return min(query + size, chunk) - key
        return min(2 * size - 1, chunk) - key

    def relative(i: int, j: int) -> float:
        back = i // size - j // size
        if back >= 0:
            return behind(back, i % size, j % size)
        return -behind(-back, size - 1 - i % size, size - 1 - j % size)

    return relative


def brute_force(
    q: Tensor, k: Tensor, v: Tensor, relative: Relative, first: int = 0, base: float = 10000.0,
    seen: Any = None, at: Any = None,
) -> Any:  # fmt: skip
    """Return attention [H, L, D] of one row, half-split pairs; the first `first` tokens are padding.

    Causal, or of the pairs that `seen` [L, L] says; of tokens one after the other, or at the positions `at` [L].
    """
    heads, length, dim = q.shape
    theta = base ** (-2.0 * np.arange(dim // 2) / dim)
    complex_q, complex_k = (
        x[..., : dim // 2].double().numpy() + 1j * x[..., dim // 2 :].double().numpy() for x in (q, k)
    )
    groups = k.shape[0]
    out = np.zeros((heads, length, dim))
    for h in range(heads):
        key, value = complex_k[h * groups // heads], v[h * groups // heads].detach().double().numpy()
        for i in range(first, length):
            keys = [j for j in range(first, length) if (j <= i if seen is None else seen[i][j])]
            where = [n - first for n in range(length)] if at is None else at
            turns = [np.exp(1j * relative(where[i], where[j]) * theta) for j in keys]
            pairs = zip(keys, turns, strict=True)
            scores = np.array([(complex_q[h, i] * key[j].conj() * t).real.sum() for j, t in pairs])
            weights = np.exp((scores - scores.max()) / math.sqrt(dim))
            out[h, i] = weights / weights.sum() @ value[keys]
    return out


def run(
    scheme: Any, q: Tensor, k: Tensor, v: Tensor, padding: int = 0, past: int = 0, seen: Any = None, at: Any = None
) -> Tensor:
    """Return attention [H, Q, D] of the queries after `past`, keys cached as the scheme has them."""
    shape = geometry(
        num_heads=q.shape[0], num_kv_heads=k.shape[0], head_dim=q.shape[-1], rotary_dim=None, base=None, layout=None
    )
    resolved = scheme.resolve(shape, None)
    mechanism = resolved.mechanism(shape)
    positions = torch.arange(q.shape[1])[None] - padding if at is None else torch.tensor([at])
    index, mask = torch.arange(q.shape[1]), None
    if seen is not None:
        mask = torch.tensor(seen)[None, None, past:]
    elif padding or past:
        mask = ((index[None] <= index[:, None]) & (index[None] >= padding))[None, None, past:]
    if mechanism.rotates:
        k = rotate(k[None], mechanism.prepare(positions, positions.amax()[None]), "half")[0]
    out, _ = attend_split(
        q[None, :, past:],
        k[None],
        v[None],
        mechanism.pieces(positions[:, past:], positions),
        positions[:, past:],
        positions,
        mask,
        causal=True,
        scaling=None,
    )
    return out[0].transpose(0, 1)


CASES = [
    (SelfExtend(original_length=16, window=4, group=3), self_extend(4, 3)),
    (SelfExtend(original_length=16, window=5, group=2), self_extend(5, 2)),
    (ReRope(original_length=16, window=4), rerope(4)),
    (LeakyReRope(original_length=16, window=4, slowdown=2.5), leaky(4, 2.5)),
    (DualChunk(original_length=16), dual_chunk(12, 2)),
    (DualChunk(original_length=16, chunk=9, local=7), dual_chunk(9, 7)),
    (String(original_length=64), string(21, 10)),
    (String(original_length=48, shift=7, local=6), string(7, 6)),
    (String(original_length=48, shift=9, local=1), string(9, 1)),
]


def qkv(length: int, heads: int = 4, groups: int = 2, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(2 * torch.randn(n, length, dim, generator=generator) for n in (heads, groups, groups))  # type: ignore[return-value]


@pytest.mark.parametrize("rows", [7, 256])
@pytest.mark.parametrize(("scheme", "relative"), CASES, ids=lambda case: str(case) if not callable(case) else "")
def test_attention_equals_brute_force(
    scheme: Any, relative: Relative, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "BLOCK", rows)
    q, k, v = qkv(53)
    expected = brute_force(q, k, v, relative)
    np.testing.assert_allclose(run(scheme, q, k, v), expected, atol=2e-5)
    padded = brute_force(q, k, v, relative, first=6)
    np.testing.assert_allclose(run(scheme, q, k, v, padding=6)[:, 6:], padded[:, 6:], atol=2e-5)
    np.testing.assert_allclose(run(scheme, q, k, v, past=40), expected[:, 40:], atol=2e-5)
    np.testing.assert_allclose(run(scheme, q, k, v, past=52), expected[:, 52:], atol=2e-5)


@pytest.mark.parametrize("rows", [7, 256])
@pytest.mark.parametrize(("scheme", "relative"), CASES, ids=lambda case: str(case) if not callable(case) else "")
def test_what_a_mask_shows_is_seen_also_ahead(
    scheme: Any, relative: Relative, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix that is read both ways, an image in the midst of a text, all of it, and ids that begin anew."""
    monkeypatch.setattr(site, "BLOCK", rows)
    length = 47
    q, k, v = qkv(length)
    both = [(0, 30), (11, 32), (0, length)]
    for start, stop in both:
        seen = [[j <= i or start <= min(i, j) <= max(i, j) < stop for j in range(length)] for i in range(length)]
        expected = brute_force(q, k, v, relative, seen=seen)
        assert np.abs(expected - brute_force(q, k, v, relative)).max() > 0.1
        for past in (0, 12, length - 1):
            np.testing.assert_allclose(run(scheme, q, k, v, past=past, seen=seen), expected[:, past:], atol=2e-5)
    at = [*range(20), *range(27)]
    expected = brute_force(q, k, v, relative, at=at)
    np.testing.assert_allclose(run(scheme, q, k, v, at=at), expected, atol=2e-5)
    backwards = at[::-1]  # all keys but the first ones stand later than the last query
    expected = brute_force(q, k, v, relative, at=backwards)
    np.testing.assert_allclose(run(scheme, q, k, v, at=backwards, past=length - 1), expected[:, -1:], atol=2e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("scheme", "relative"), CASES, ids=lambda case: str(case) if not callable(case) else "")
def test_one_query_of_each_row_equals_brute_force_wherever_the_rows_stand(
    scheme: Any, relative: Relative, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows begin elsewhere, have holes and hidden keys: regions of several rows share keys, and none needs blocks."""
    monkeypatch.setattr(site.Scoring, "block", None)
    length, rng = 33, np.random.default_rng(seed)
    q, k, v = qkv(length)
    at = np.stack([np.sort(rng.choice(70, length, replace=False)) for _ in range(4)])
    shown = rng.random((4, length)) < (0.6, 0.8, 0.9, 1.0)[seed % 4]
    shown[:, -1] = True
    shape = geometry(num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=None, base=None, layout=None)
    mechanism, positions = scheme.resolve(shape, None).mechanism(shape), torch.tensor(at)
    keys = k.expand(4, -1, -1, -1)
    if mechanism.rotates:
        keys = rotate(keys, mechanism.prepare(positions, positions.amax(dim=-1)[:, None, None, None]), "half")
    pieces, mask = mechanism.pieces(positions[:, -1:], positions), torch.tensor(shown)[:, None, None]
    options: dict[str, Any] = {"causal": True, "scaling": None}
    queries = q[None, :, -1:].expand(4, -1, -1, -1)
    arguments = queries, keys, v.expand(4, -1, -1, -1), pieces, positions[:, -1:], positions
    found = [attend_split(*arguments, kind, **options)[0] for kind in (mask, torch.where(mask, 0.0, -torch.inf))]
    for row in range(4):
        expected = brute_force(q, k, v, relative, seen=[list(shown[row])] * length, at=list(at[row]))[:, -1]
        for each in found:
            np.testing.assert_allclose(each[row, 0], expected, atol=5e-5)


@settings(max_examples=30)
@given(
    length=st.integers(1, 40),
    window=st.integers(1, 15),
    group=st.integers(2, 9),
    slowdown=st.floats(1, 20),
    dim=st.sampled_from([2, 6, 10]),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 3), (5, 5)]),
)
def test_any_parameters_equal_the_brute_force(
    length: int, window: int, group: int, slowdown: float, dim: int, heads: tuple[int, int]
) -> None:
    q, k, v = qkv(length, *heads, dim=dim)
    cases: list[tuple[Any, Relative]] = [
        (SelfExtend(original_length=16, window=window, group=group), self_extend(window, group)),
        (ReRope(original_length=16, window=window), rerope(window)),
        (LeakyReRope(original_length=16, window=window, slowdown=slowdown), leaky(window, slowdown)),
    ]
    if window > 1:
        cases.append((DualChunk(original_length=16, chunk=window, local=window // 2), dual_chunk(window, window // 2)))
    for scheme, relative in cases:
        np.testing.assert_allclose(run(scheme, q, k, v), brute_force(q, k, v, relative), atol=5e-5)


def test_gradients_are_those_of_one_softmax() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(20))
    run(ReRope(original_length=16, window=4), q, k, v).square().sum().backward()
    found = [x.grad.clone() for x in (q, k, v)]  # type: ignore[union-attr]
    step = 1e-2
    for x, gradient in zip((q, k, v), found, strict=True):
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        ends = []
        for sign in (1, -1):
            moved = [y.detach() + (sign * step * direction if y is x else 0) for y in (q, k, v)]
            ends.append(np.square(brute_force(*moved, rerope(4))).sum())
        assert float((gradient * direction).sum()) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-3)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.values = max(self.values, tensor.numel())
        return out


@pytest.mark.parametrize("scheme", [case[0] for case in CASES[::2]], ids=str)
def test_nothing_of_the_length_squared_is_ever_held(scheme: Any) -> None:
    length, heads = 2048, 2
    q, k, v = qkv(length, heads=heads, groups=1)
    with Largest() as largest:
        run(scheme, q, k, v)
    assert largest.values <= heads * site.BLOCK * length
    assert largest.values < length * length


def test_log_scaling_multiplies_the_queries() -> None:
    shape = geometry()
    mechanism = ReRope(original_length=100, log_scaling=True).resolve(shape, None).mechanism(shape)
    found = mechanism.scale(torch.tensor([[0, 50, 99, 999, 9999]]))
    expected = [max(1.0, math.log(p + 1) / math.log(100)) for p in (0, 50, 99, 999, 9999)]
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    assert not ReRope(original_length=100).resolve(shape, None).mechanism(shape).scales


@pytest.mark.parametrize("step", [1, 3, 8])
def test_dynamic_by_query_gives_each_token_the_angles_of_its_own_length(step: int) -> None:
    q, k, v = qkv(40)
    dim, original, factor = q.shape[-1], 16, 2.0
    found = run(Dynamic(original_length=original, factor=factor, follow="query", step=step), q, k, v)
    for i in (0, 5, 15, 16, 17, 23, 24, 39):
        length = max(original, original + math.ceil((i + 1 - original) / step) * step)
        base = 10000.0 * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
        expected = brute_force(q[:, : i + 1], k[:, : i + 1], v[:, : i + 1], lambda a, b: a - b, base=base)
        np.testing.assert_allclose(found[:, i], expected[:, i], atol=2e-5, err_msg=f"token {i}")


def test_the_models_own_scaled_angles_are_kept() -> None:
    own = (0.5, 0.25, 0.125, 0.0625)
    shape = geometry(head_dim=8, rotary_dim=8, base=10000.0, frequencies=own, attention_factor=1.25)
    angles = ReRope(window=4).resolve(shape, None).angles(shape)
    assert tuple(angles.inv_freq.tolist()) == own
    assert angles.attention_factor == 1.25
    plain = ReRope(window=4, base=100.0).resolve(shape, None).angles(shape)
    np.testing.assert_allclose(plain.inv_freq, [100.0 ** (-i / 4) for i in range(4)], rtol=1e-6)


@pytest.mark.parametrize(
    ("scheme", "max_length", "message"),
    [
        (SelfExtend(window=4), None, r"self_extend: give group or max_length; the model's own length is 32 tokens"),
        (SelfExtend(window=32, group=2), None, r"window must be less than the original length, 32 tokens, got 32"),
        (SelfExtend(window=8, group=2), 64, r"window 8 and group 2 reach 56 tokens, but max_length is 64"),
        (LeakyReRope(window=8), None, r"leaky_rerope: give slowdown or max_length"),
        (LeakyReRope(window=8, slowdown=2), 64, r"window 8 and slowdown 2 reach 56 tokens, but max_length is 64"),
        (DualChunk(chunk=32), None, r"needs local < chunk < original length, got local=4, chunk=32 .* 32 tokens"),
        (DualChunk(chunk=8, local=8), None, r"needs local < chunk"),
        (String(shift=8, local=9), None, r"needs local < shift < original length.*got local=9, shift=8 .* 32 tokens"),
        (String(shift=8, local=8), None, r"or nothing would be shifted; got local=8, shift=8"),
        (String(shift=32), None, r"needs local < shift < original length.*got local=16, shift=32 .* 32 tokens"),
        (String(shift=8, local=4), 37, r"reach 36 tokens, but max_length is 37; give a larger shift, less than 32, or"),
        (String(), 64, r"shift 31 and local 15 reach 48 tokens, but max_length is 64; use 'self_extend'"),
        (ReRope(original_length=1, log_scaling=True), None, r"window must be less than the original length, 1 "),
    ],
)
def test_what_cannot_be_is_refused(scheme: Any, max_length: int | None, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        scheme.resolve(geometry(original_length=32, head_dim=8), max_length)


def test_string_takes_the_sizes_that_a_length_needs() -> None:
    shape = geometry(original_length=8192, head_dim=8, base=1e4, rotary_dim=8, frequencies=(1.0, 0.1, 0.01, 0.001),
                     attention_factor=1.5)  # fmt: skip
    inside = String().resolve(shape, None)
    assert (inside.shift, inside.local, inside.reach(shape)) == (8192 // 3, 128, 8192 + 8192 // 3 - 128)
    beyond = String().resolve(shape, 12_000)
    assert (beyond.shift, beyond.local, beyond.reach(shape)) == (12_000 - 8192 + 128, 128, 12_000)
    sharper = String(attention_factor=1.2).resolve(shape, None).angles(shape).attention_factor
    assert sharper == pytest.approx(1.5 * 1.2)


def test_angles_that_follow_the_length_are_none_to_keep() -> None:
    with pytest.raises(SchemeError, match=r"self_extend: the model's own angles follow the length of its input.*base="):
        SelfExtend(group=2).resolve(geometry(base=10000.0, rotary_dim=16, layout="half"), None)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(("scheme", "_"), CASES[:1] + CASES[2:3] + CASES[4:5])
def test_a_mask_of_one_row_is_of_all_queries(scheme: Any, _: Relative, additive: bool) -> None:
    """As encoders make it of padding, [B, 1, 1, K]; a text of more queries than one block takes."""
    length = site.BLOCK + 40
    query, key, value = (part[None] for part in qkv(length))
    shape = geometry(num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=None, base=None, layout=None)
    mechanism: Any = scheme.resolve(shape, None).mechanism(shape)
    at = torch.arange(length)[None]
    if mechanism.rotates:
        key = rotate(key, mechanism.prepare(at, at.amax()[None]), "half")
    shown = torch.rand(1, 1, 1, length) < 0.7
    mask = torch.where(shown, 0.0, torch.finfo(torch.float32).min) if additive else shown

    def attended(mask: Tensor) -> Tensor:
        pieces = mechanism.pieces(at, at)
        return attend_split(query, key, value, pieces, at, at, mask, causal=False, scaling=None)[0]

    whole = attended(mask.expand(-1, -1, length, -1))
    assert torch.equal(attended(mask), whole)
    assert not torch.equal(attended(torch.ones_like(shown)), whole)
