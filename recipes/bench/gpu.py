"""Benchmarks for a GPU in bfloat16, by CUDA events and the allocator's peaks; without one, tiny sizes on the CPU.

python -m recipes.bench.run gpu --out results
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_posswap import Alibi, SelfExtend, T5Bias, patch_model, set_backend
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.calls import attend, numbered_anew
from hf_posswap.kernels.flex import ByDistance, Penalty, attend_read, attend_settled
from hf_posswap.kernels.merge import region_calls
from hf_posswap.kernels.segments import whole
from hf_posswap.rope_math import Frequencies, cos_sin, default_inv_freq, rotate
from recipes.bench.decode import step_after
from recipes.bench.harness import Case, with_gradients
from recipes.bench.models import llama, smollm2
from recipes.bench.train import step

NO_MOD, FLASH = "flex without a mod", "one fused causal call"
THEIRS = "model(ids, labels=ids)"
STOCK, FORMULA, MERGED = "stock", "the formula over all pairs", "merged calls"


def cases(smoke: bool) -> Iterator[Case]:
    """Yield the GPU's cases; on a machine without one, the same code at smoke-run sizes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = smoke or device == "cpu"
    if device == "cpu" and not smoke:
        yield Case("what needs a GPU", {"nothing": lambda: None}, missing={"all of it": "no CUDA device here"})
        return
    yield _rope(device, small)
    for name in ("ALiBi", "T5"):
        yield from _flex(name, device, 128 if small else 8192)
    for length in (96,) if small else (8192, 32768):
        yield _pieces(device, length)
    yield _training(device, small)
    yield _perplexity(device, small)
    for scheme in ("yarn", "self_extend", "dual_chunk", "alibi"):
        for length in (96,) if small else (4096, 16384):
            yield from _reading(scheme, device, length, small)
    for scheme in ("self_extend", "dual_chunk"):
        for length in (96,) if small else (4096, 16384):
            yield _by_flex(scheme, device, length, small)
    for scheme in ("alibi", "t5", "self_extend"):
        yield _padded(scheme, device, small)
    for scheme in ("alibi", "self_extend"):
        yield _compiled(scheme, device, small)


def _reading(scheme: str, device: str, length: int, small: bool) -> Iterator[Case]:
    """Yield reading a text at once, and one token after it, by a swapped model of SmolLM2's shape and the stock one."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ways: dict[str, Any] = {"ours": smollm2(small, scheme=scheme), STOCK: smollm2(small)}
    models = {way: model.to(device, dtype) for way, model in ways.items()}
    ids = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(0)).to(device)

    def read(model: Any) -> Callable[[], Any]:
        return lambda: model.base_model(ids, use_cache=False).last_hidden_state

    settings: dict[str, Any] = {"tolerance": None, "device": device, "repetitions": 7}
    texts = {way: read(model) for way, model in models.items()}
    yield Case(f"a text of {length}, {scheme}", texts, {STOCK: 1.1 if scheme == "yarn" else 2.0}, **settings)
    steps = {way: step_after(model, length) for way, model in models.items()}
    yield Case(f"one token after {length}, {scheme}", steps, {STOCK: 1.1}, **settings)


def _by_flex(scheme: str, device: str, length: int, small: bool) -> Case:
    """Return reading a text in two rotations: by regions in flex_attention, by merged calls, and by the stock model."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, stock = (smollm2(small, scheme=way).to(device, dtype) for way in (scheme, None))
    ids = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(0)).to(device)

    def read(model: Any, backend: str | None = None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            if backend is not None:
                set_backend(model, backend)
            return model.base_model(ids, use_cache=False).last_hidden_state

        return run

    ways = {"ours": read(model, "flex"), MERGED: read(model, "merge"), STOCK: read(stock)}
    return Case(
        f"a text of {length}, {scheme}, flex", ways, {MERGED: 1.0, STOCK: 2.0}, tolerance=0.25,
        unlike=frozenset({STOCK}), device=device, repetitions=5,
    )  # fmt: skip


def _padded(scheme: str, device: str, small: bool) -> Case:
    """Return two texts in a batch, one of them three quarters as long: ours, by the formula over all pairs, stock."""
    length = 96 if small else 4096
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, stock = (smollm2(small, scheme=way).to(device, dtype) for way in (scheme, None))
    ids = torch.randint(0, 512, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    shown = torch.arange(length, device=device) >= torch.tensor([[0], [length // 4]], device=device)

    def read(model: Any, backend: str | None = None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            if backend is not None:
                set_backend(model, backend)
            return model.base_model(ids, attention_mask=shown.long(), use_cache=False).last_hidden_state[shown]

        return run

    ways = {"ours": read(model, "auto"), FORMULA: read(model, "plain"), STOCK: read(stock)}
    return Case(
        f"a padded batch of 2 x {length}, {scheme}", ways, {STOCK: 2.0}, tolerance=0.25, unlike=frozenset({STOCK}),
        device=device, repetitions=5, **_peaks(device, {FORMULA: 0.7} if scheme != "self_extend" else {}),
    )  # fmt: skip


def _compiled(scheme: str, device: str, small: bool) -> Case:
    """Return a text read by models of six layers that are compiled: ours, with the formula in the graph, stock."""
    length = 96 if small else 8192
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ids = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(0)).to(device)

    def read(scheme: str | None, backend: str | None) -> Callable[[], Tensor]:
        model = smollm2(small, scheme=scheme, layers=6).to(device, dtype)
        if backend is not None:
            set_backend(model, backend)
        forward = torch.compile(model.base_model.forward, dynamic=False)
        return lambda: forward(ids, use_cache=False).last_hidden_state

    ways = {"ours": read(scheme, "auto"), FORMULA: read(scheme, "plain"), STOCK: read(None, None)}
    return Case(
        f"a text of {length}, {scheme}, compiled", ways, {STOCK: 1.15}, tolerance=0.25, unlike=frozenset({STOCK}),
        device=device, repetitions=5, **_peaks(device, {FORMULA: 0.5, STOCK: 1.1}),
    )  # fmt: skip


def _peaks(device: str, goals: dict[str, float]) -> dict[str, Any]:
    """Return what has the peaks of a case measured by the allocator of a GPU, compared as `goals` say."""
    return {"memory": {}, "memory_goals": goals} if device == "cuda" else {}


def _noise(device: str, *shape: int) -> Tensor:
    source = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(*shape, generator=source, device=device, dtype=dtype)


def _rope(device: str, small: bool) -> Case:
    """Return RoPE in the memory layout of a model's, compared with a copy: 70 % of its bandwidth is a ratio of 1.43."""
    length = 64 if small else 32768
    q, k = (_noise(device, 1, length, heads, 128).transpose(1, 2) for heads in (32, 8))
    table = cos_sin(torch.arange(length, device=device)[None], Frequencies(default_inv_freq(10000.0, 128).to(device)))
    cos, sin = (torch.cat((half[:, 0], half[:, 0]), dim=-1) for half in table)
    theirs = cos.to(q.dtype), sin.to(q.dtype)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: (rotate(q, table, "half"), rotate(k, table, "half")),
        "transformers": lambda: apply_rotary_pos_emb(q, k, *theirs),
        "copy": lambda: (q.clone(), k.clone()),
    }
    return Case(
        f"RoPE, {length} tokens", ways, {"copy": 1 / 0.7}, tolerance=5e-2, unlike=frozenset({"copy"}), device=device,
        memory={} if device == "cuda" else None,
    )  # fmt: skip


def _flex(name: str, device: str, length: int) -> Iterator[Case]:
    """Yield a bias computed from positions, forward and with backward, compared with flex_attention without one."""
    q, k, v = (_noise(device, 1, 16, length, 64) for _ in range(3))
    attend: Any = torch.compile(flex_attention)
    mask: BlockMask = create_block_mask(_causal, 1, None, length, length, device=device)
    mechanism = _mechanism(name, device)
    bias, settled = _bias(mechanism, device, length), mechanism.settles_at if device == "cuda" else None
    if settled is not None:
        line = mechanism.distance_bias(torch.arange(settled + 1, device=device)).detach()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if settled is not None:
            return attend_settled(q, k, v, line, scaling=q.shape[-1] ** -0.5)
        return attend_read(q, k, v, bias, scaling=q.shape[-1] ** -0.5, causal=True)

    def without(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, block_mask=mask)

    ways = {"ours": lambda: ours(q, k, v), NO_MOD: lambda: without(q, k, v)}
    settings: dict[str, Any] = {"unlike": frozenset({NO_MOD}), "device": device}
    if device == "cuda":
        # O(L): the memory without a bias, plus [H, L]
        settings |= {"memory": {}, "memory_beyond": {NO_MOD: 64.0}}
    else:
        ways["the formula"] = lambda: _formula(q, k, v, bias)
    yield Case(f"{name} forward, {length}", ways, {NO_MOD: 1.15}, **settings)
    if device == "cuda":  # flex has no backward on a CPU
        with_backward = {"ours": with_gradients(ours, q, k, v), NO_MOD: with_gradients(without, q, k, v)}
        yield Case(f"{name} forward and backward, {length}", with_backward, {NO_MOD: 1.4}, **settings)


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _mechanism(name: str, device: str) -> Any:
    geometry = Geometry(1024, 16, 16, 64, 12, 2048, causal=True)
    scheme: Any = Alibi() if name == "ALiBi" else T5Bias(init_std=1.0)
    return scheme.resolve(geometry, None).mechanism(geometry).to(device)


def _bias(mechanism: Any, device: str, length: int) -> Any:
    at = torch.arange(length, device=device)[None]
    if mechanism.slopes is not None:
        return Penalty(mechanism.slopes.to(device), at, at)
    line = mechanism.distance_bias(torch.arange(1 - length, length, device=device)).detach()
    return ByDistance(line, length - 1, at, at)


def _formula(q: Tensor, k: Tensor, v: Tensor, bias: Any) -> Tensor:
    length, heads = q.shape[2], q.shape[1]
    rows = torch.arange(length)
    grid = bias[0, torch.arange(heads)[:, None, None], rows[:, None].clamp(min=0), rows]  # [H, Q, K]
    return sdpa(q, k, v, attn_mask=grid.masked_fill(rows > rows[:, None], -torch.inf)[None].to(q.dtype))


def _pieces(device: str, length: int) -> Case:
    """Return two rotations in one attention, compared with one fused call."""
    inv = tuple(default_inv_freq(10000.0, 128).tolist())
    geometry = Geometry(1024, 8, 8, 128, 12, length // 4, True, 128, "half", 10000.0, inv)
    mechanism: Any = SelfExtend().resolve(geometry, length).mechanism(geometry)
    q, k, v = (_noise(device, 1, 8, length, 128) for _ in range(3))
    at = torch.arange(length, device=device)[None]
    # once for all layers of a model
    numbers, calls = numbered_anew(region_calls(mechanism.regions, whole(1, length, length, causal=True)))
    pieces = mechanism.pieces(at, at)

    def ours() -> Tensor:
        pairs = [(pieces[n].rotate_query(q, 0, length), pieces[n].rotate_key(k, 0, length)) for n in numbers]
        return attend(pairs, v, calls, scaling=128**-0.5)

    ways = {"ours": ours, FLASH: lambda: sdpa(q, k, v, is_causal=True)}
    memory: dict[str, Any] = {"memory": {}, "memory_beyond": {FLASH: 1024.0}} if device == "cuda" else {}
    return Case(
        f"two rotations, {length}", ways, {FLASH: 1.3}, unlike=frozenset({FLASH}), device=device, repetitions=3,
        **memory,
    )  # fmt: skip


def _training(device: str, small: bool) -> Case:
    """Return a training step of a swapped GPT-NeoX of 125 M parameters, compared with the native class."""
    batch, length = (1, 32) if small else (8, 2048)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    steps = {}
    for way in ("ours", "native"):
        model = _neox(small)
        if way == "ours":
            patch_model(model, "rope", site="attention")
        steps[way] = step(model.to(device, dtype).train(), batch, length)
    return Case(
        f"training step, {batch} x {length}", steps, {"native": 1.03}, tolerance=None, device=device,
        **_peaks(device, {"native": 1.03}),
    )  # fmt: skip


def _neox(small: bool) -> Any:
    torch.manual_seed(0)
    width, layers, heads = (48, 2, 4) if small else (768, 12, 12)
    config = GPTNeoXConfig(
        vocab_size=512 if small else 50304, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


def _perplexity(device: str, small: bool) -> Case:
    """Return the chunked loss of one long text with a vocabulary of 128k, compared with transformers' own."""
    length, vocabulary = (64, 64) if small else (32768, 131072)
    model = llama(small, vocabulary).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, length), generator=source).to(device)
    scorer = Scorer(model)
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: scorer.nll(ids).mean().float().cpu(),
        THEIRS: lambda: model(ids, labels=ids, use_cache=False).loss.float().cpu(),
    }
    return Case(
        f"perplexity of {length} tokens, {vocabulary} words", ways, {THEIRS: 1.2}, tolerance=2e-2, device=device,
        repetitions=3, **_peaks(device, {THEIRS: 0.2}),
    )  # fmt: skip
