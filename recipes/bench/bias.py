"""Attention with a bias, compared with attention without one and with a dense bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from hf_posswap.geometry import Geometry
from hf_posswap.kernels.blockwise import attend_by_distance, attend_made
from hf_posswap.kernels.piecewise_bias import attend_piecewise, piecewise_blocks
from hf_posswap.kernels.row_bias import attend_linear
from hf_posswap.kernels.segments import whole
from hf_posswap.schemes import Fire, Kerple, T5Bias
from hf_posswap.schemes.alibi import slopes
from recipes.bench import peers
from recipes.bench.harness import Case, attention_inputs, with_gradients

HEADS, SCALING = 12, 0.125
NO_BIAS, DENSE, X = "sdpa without bias", "dense bias", "x-transformers"
T5_DENSE = "transformers' position_bias="
FIRE_DENSE, FIRE_PAIRS = "dense bias, as the paper prints it", "its network for each pair, in blocks"
ONCE = 32_768
"""Tokens for measurements of memory alone."""


def cases(smoke: bool) -> Iterator[Case]:
    """Yield ALiBi, T5, KERPLE and FIRE, forward and with gradients."""
    for length in (48,) if smoke else (1024, 2048, 4096, 8192):
        yield from _alibi(length)
    for length in (48,) if smoke else (2048, 4096, 8192):
        yield _forward("T5", T5Bias(init_std=1.0), length, smoke)
        yield _forward("KERPLE", Kerple(), length, smoke)
    for length in (48,) if smoke else (1024, 2048, 4096):
        yield _learned(length, smoke)
    yield _fire(48 if smoke else 2048, smoke)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def _with_dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    length = q.shape[2]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return sdpa(q, k, v, attn_mask=bias.masked_fill(future, -torch.inf))


def _mechanism(scheme: Any) -> Any:
    geometry = Geometry(768, HEADS, HEADS, 64, 12, 2048, causal=True)
    return scheme.resolve(geometry, None).mechanism(geometry)


def _alibi(length: int) -> Iterator[Case]:
    inputs, slope = attention_inputs(length, HEADS), torch.tensor(slopes(HEADS))

    def row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_linear(q, k, v, slope, scaling=SCALING)

    ways = {"ours": lambda: row(*inputs), NO_BIAS: lambda: _plain(*inputs)}
    if length <= 4096 and peers.missing("x_transformers") is None:
        x_attention = peers.x_transformers_alibi(HEADS)
        ways[X] = lambda: x_attention(*inputs)
    missing = peers.missing_peers("x_transformers")
    yield Case(f"ALiBi forward, {length}", ways, {NO_BIAS: 1.08}, unlike=frozenset({NO_BIAS}), missing=missing)
    with_backward = {"ours": with_gradients(row, *inputs), NO_BIAS: with_gradients(_plain, *inputs)}
    yield Case(f"ALiBi forward and backward, {length}", with_backward, {NO_BIAS: 1.08}, unlike=frozenset({NO_BIAS}))

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_linear(q, k, v, slope, scaling=SCALING, windowed=True)

    forward = {"ours": lambda: windowed(*inputs), "not windowed": ways["ours"], NO_BIAS: ways[NO_BIAS]}
    goals = {NO_BIAS: 0.65} if length == 8192 else {}
    yield Case(f"ALiBi windowed, {length}", forward, goals, unlike=frozenset({NO_BIAS}))
    with_backward = {"ours": with_gradients(windowed, *inputs), "not windowed": with_backward["ours"],
                     NO_BIAS: with_backward[NO_BIAS]}  # fmt: skip
    name = f"ALiBi windowed, forward and backward, {length}"
    yield Case(name, with_backward, {NO_BIAS: 1.08}, unlike=frozenset({NO_BIAS}))


def _forward(name: str, scheme: Any, length: int, smoke: bool) -> Case:
    inputs, mechanism, at = attention_inputs(length, HEADS), _mechanism(scheme), torch.arange(length)[None]

    def ours() -> Tensor:
        line = mechanism.distance_bias(at[0])
        return attend_by_distance(*inputs, line, scaling=SCALING, causal=True)

    ways: dict[str, Callable[[], Tensor]] = {"ours": ours, NO_BIAS: lambda: _plain(*inputs)}
    goals, missing = {NO_BIAS: 1.2}, {}
    if length <= 4096 and name == "T5":
        goals[T5_DENSE], missing = 0.2, peers.missing_peers("x_transformers")
        dense = peers.transformers_t5(mechanism.table.detach(), SCALING)
        ways[T5_DENSE] = lambda: dense(*inputs)
        if not missing:
            x_attention = peers.x_transformers_t5(mechanism.table)
            ways[X] = lambda: x_attention(*inputs)
    elif length <= 4096:
        ways[DENSE] = lambda: _with_dense(*inputs, mechanism.bias(at, at))
    return Case(f"{name} forward, {length}", ways, goals, unlike=frozenset({NO_BIAS}), missing=missing)


def _learned(length: int, smoke: bool) -> Case:
    """Return T5 with gradients, including its table's."""
    inputs, table = attention_inputs(length, HEADS), torch.randn(32, HEADS, generator=torch.Generator().manual_seed(1))
    row = _mechanism(T5Bias()).bucket[128:].clone()  # of distances 0 to 128, and all beyond
    of_distance = row[torch.arange(length).clamp(max=128)]

    def ours(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return attend_by_distance(q, k, v, table[of_distance].T, scaling=SCALING, causal=True)

    ways: dict[str, Callable[[], Any]] = {
        "ours": with_gradients(ours, *inputs, table),
        NO_BIAS: with_gradients(_plain, *inputs),
        T5_DENSE: with_gradients(peers.transformers_t5(table, SCALING), *inputs, table),
    }
    return Case(
        f"learned T5 forward and backward, {length}", ways, {NO_BIAS: 2.0, T5_DENSE: 0.4}, tolerance=2e-2,
        unlike=frozenset({NO_BIAS}), memory=None if smoke or length != 4096 else {"length": length},
        memory_goals={T5_DENSE: 0.1},
    )  # fmt: skip


def _fire(length: int, smoke: bool) -> Case:
    ways = {way: _fire_way(way, length) for way in ("ours", FIRE_PAIRS, FIRE_DENSE, NO_BIAS)}
    memory = None if smoke else {"length": length, "fire": 1}
    return Case(
        f"FIRE forward, {length}", ways, {FIRE_DENSE: 0.2}, unlike=frozenset({NO_BIAS}), memory=memory,
        memory_goals={FIRE_DENSE: 0.05},
    )  # fmt: skip


def _fire_way(way: str, length: int) -> Callable[[], Tensor]:
    inputs, mechanism, at = attention_inputs(length, HEADS), _mechanism(Fire()), torch.arange(length)[None]
    if way == NO_BIAS:
        return lambda: _plain(*inputs)
    if way == FIRE_DENSE:
        dense = peers.fire_dense(mechanism)
        return lambda: _with_dense(*inputs, dense(length))
    if way == "ours":
        text = whole(1, length, length, causal=True)

        def piecewise() -> Tensor:
            with torch.no_grad():  # gradients of the network's weights have their own row among the situations
                blocks = piecewise_blocks(*inputs[:2], mechanism.piecewise_bias, text)
                return attend_piecewise(*inputs, blocks, scaling=SCALING)

        return piecewise
    if way != FIRE_PAIRS:
        raise KeyError(way)

    def make(_: slice, rows: slice, columns: slice) -> Tensor:
        return mechanism.bias(at[:, rows], at[:, columns])

    return lambda: attend_made(*inputs, make, tuple(mechanism.parameters()), None, scaling=SCALING, causal=True)


def apart(way: str, length: int, fire: int = 0) -> Callable[[], Any]:
    """Return the function whose memory is measured in a separate process."""
    run = _fire_way(way, length) if fire else _learned(length, True).ways[way]

    def without_gradients() -> Any:
        with torch.no_grad():
            return run()

    return without_gradients
