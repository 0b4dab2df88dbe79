"""Keys that the cache holds rotated once for each piece, or once for the far one: every cache gives the same."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

from hf_posswap import patch_model, plan_swap
from hf_posswap.errors import PosswapError
from hf_posswap.patching.sites.attention.split_attention import Scoring
from hf_posswap.rope_math import CosSin
from hf_posswap.schemes import piecewise
from hf_posswap.schemes.common import piece
from hf_posswap.utils.devices import standing_for
from tests.stock import with_cache

LENGTH, WIDTH = 70, 8
EXACT = 1e-11
IDS = torch.arange(2 * LENGTH).view(2, LENGTH).mul(7).remainder(61) + 3
SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("self_extend", {}),
    ("rerope", {"log_scaling": True}),
    ("leaky_rerope", {}),
    ("longrope", {"follow": "query", "long_factor": [1.0, 1.5, 2.0, 4.0], "site": "attention"}),
    ("longrope", {"follow": "query", "long_factor": [2.0, 2.0, 3.0, 4.0], "original_positions": 5}),
]


TURNS_ON = ("self_extend", "rerope", "leaky_rerope")
"""Schemes whose near keys are turned on from their far ones, on a CPU, in a cache that grows."""


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.3, bos_token_id=0,
        eos_token_id=1, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(layers: int = 2) -> Any:
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def swapped(scheme: str, options: dict[str, Any], build: Any = gpt2) -> Any:
    torch.manual_seed(0)
    model = build().double().eval()
    patch_model(model, scheme, max_length=128, **options)
    return model


@torch.no_grad()
def steps(model: Any, cache: Any, cuts: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    mask, outs = torch.ones_like(IDS) if mask is None else mask, []
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    for start, stop in zip((0, *cuts), (*cuts, LENGTH), strict=True):
        seen = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        outs.append(model(IDS[:, start:stop], **with_cache(model, cache), use_cache=True, **seen).logits)
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=str)
@pytest.mark.parametrize("build", [gpt2, llama])
@torch.no_grad()
def test_every_cache_gives_what_a_whole_forward_gives(scheme: str, options: dict[str, Any], build: Any) -> None:
    model = swapped(scheme, options, build)
    whole = model(IDS, use_cache=False).logits
    near = EXACT if build is gpt2 else 5e-5  # the norms of a Llama are float32
    cuts = (20, 31, 32, 33, 60, *range(61, LENGTH))
    cache = DynamicCache()
    assert (steps(model, cache, cuts) - whole).abs().max() < near
    assert [layer.keys.shape[-1] for layer in cache.layers] == [WIDTH if scheme in TURNS_ON else 2 * WIDTH] * 2
    assert [layer.values.shape[-1] for layer in cache.layers] == [WIDTH] * 2
    static = StaticCache(config=model.config, max_cache_len=LENGTH + 3)
    assert (steps(model, static, cuts) - whole).abs().max() < near
    assert static.layers[0].keys.shape[-1] == 2 * WIDTH
    cache.crop(40 - LENGTH)
    again = model(IDS[:, 40:], **with_cache(model, cache), use_cache=True).logits
    assert (again - whole[:, 40:]).abs().max() < near


@pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=str)
@torch.no_grad()
def test_a_cache_of_a_shape_given_before_holds_one_key_a_token(scheme: str, options: dict[str, Any]) -> None:
    model = swapped(scheme, options)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    cache.early_initialization(batch_size=2, num_heads=4, head_dim=WIDTH, dtype=torch.float64, device="cpu")
    found = steps(model, cache, (20, 33, 69))
    assert (found - model(IDS, use_cache=False).logits).abs().max() < EXACT
    assert cache.layers[0].keys.shape[-1] == WIDTH


@pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=str)
@torch.no_grad()
def test_left_padding_changes_no_logits(scheme: str, options: dict[str, Any]) -> None:
    model, mask = swapped(scheme, options), torch.ones_like(IDS)
    mask[0, :9] = 0
    found = steps(model, DynamicCache(), (40, 55, 69), mask)
    alone = model(IDS[:1, 9:], use_cache=False).logits
    assert (found[:1, 9:] - alone).abs().max() < EXACT


@pytest.mark.parametrize(("scheme", "options"), SCHEMES[::3], ids=str)
@torch.no_grad()
def test_beams_take_their_copies_along(scheme: str, options: dict[str, Any]) -> None:
    model = swapped(scheme, options)
    settings = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = IDS[:, :28]
    found = [
        model.generate(prompts, attention_mask=torch.ones_like(prompts), use_cache=kept, **settings)
        for kept in (True, False)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=str)
@torch.no_grad()
def test_a_step_rotates_no_far_key(
    scheme: str, options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = swapped(scheme, options)
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=LENGTH)
    model(IDS[:, :60], **with_cache(model, cache), use_cache=True)
    tokens: list[int] = []
    for module, name in ((piece, "rotate"), (piece, "rotate_read"), (piecewise, "rotate")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, *rest, real=real: tokens.append(x.shape[2]) or real(x, *rest))
    model(IDS[:, 60:61], **with_cache(model, cache), use_cache=True)
    if kind == "dynamic" and scheme in TURNS_ON:
        assert set(tokens) == {1, 8}  # of 32 positions a quarter is the window
    else:
        assert set(tokens) == {2}  # the new key alone, by both tables at once


EVERY = [*SCHEMES, ("dual_chunk", {}), ("string", {"original_length": 128})]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("scheme", "options"), EVERY, ids=str)
def test_steps_on_a_gpu_give_what_a_whole_forward_gives(
    scheme: str, options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the CPU take the ways of a GPU, on which numbers are read once a step, and not in a CUDA graph."""
    model, reads = swapped(scheme, options), []
    real = Scoring._read_ranges
    monkeypatch.setattr(Scoring, "_read_ranges", lambda scoring: reads.append(1) or real(scoring))
    padded = torch.ones_like(IDS)
    padded[1, :11] = 0
    for mask in (None, padded):
        whole = steps(model, DynamicCache(), (), mask)
        for is_captured in (False, True):
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda value=is_captured: value)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda value=is_captured: value)
            cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=LENGTH + 5)
            reads.clear()
            with standing_for("cuda"):
                found = steps(model, cache, (20, 33, *range(60, LENGTH)), mask)
            shown = slice(None) if mask is None else mask.bool()
            assert (found - whole)[shown].abs().max() < EXACT
            of_steps = (
                LENGTH - 60 if kind == "dynamic" and not is_captured else 0
            )  # layers of a static cache share nothing
            assert len(reads) == of_steps


@pytest.mark.parametrize("scheme", [*TURNS_ON, "dual_chunk"])
@torch.no_grad()
def test_a_step_on_a_gpu_runs_at_most_half_as_many_operators_more(scheme: str) -> None:
    """There each call of an operator costs more than its arithmetic."""
    counts = []
    for model in (llama(layers=24).eval(), patch_model(llama(layers=24).eval(), scheme, max_length=128)):
        with standing_for("cuda"):
            cache = DynamicCache()
            model(IDS[:1, :60], **with_cache(model, cache), use_cache=True)
            with OperatorCounter() as counter:
                model(IDS[:1, 60:61], **with_cache(model, cache), use_cache=True)
        counts.append(counter.count)
    assert counts[1] < 1.55 * counts[0]


def test_tables_in_a_row_are_made_once_and_freed_with_their_tables() -> None:
    tables = tuple(CosSin(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2)) for _ in range(2))
    row = piece.in_a_row(tables)
    assert piece.in_a_row(tables) is row
    assert row.cos.shape == (1, 1, 2, 2)
    assert piece.in_a_row((*tables, tables[1])).cos.shape == (1, 1, 3, 2)
    tensors = [weakref.ref(tensor) for table in (*tables, row) for tensor in table]
    gc.disable()
    try:
        del tables, row
        assert [tensor() for tensor in tensors] == [None] * 6
    finally:
        gc.enable()


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that compute something: no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.overloadpacket is not torch.ops.aten._unsafe_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", TURNS_ON)
@torch.no_grad()
def test_a_base_that_scales_its_angles_is_scaled_once(scheme: str) -> None:
    """The factor is in the cached key: what turns it on has none."""
    torch.manual_seed(0)
    model = llama().double().eval()
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    config = LlamaConfig(**{**model.config.to_dict(), "rope_parameters": scaling})
    model = patch_model(LlamaForCausalLM(config).double().eval(), scheme, max_length=128)
    whole = model(IDS, use_cache=False).logits
    assert (steps(model, DynamicCache(), (20, 33, 69)) - whole).abs().max() < 5e-5


@torch.no_grad()
def test_a_cache_that_was_filled_otherwise_is_refused() -> None:
    """As a quantized one may be, which does not say what it holds."""
    model, cache = swapped("self_extend", {}), DynamicCache()
    model(IDS[:, :60], **with_cache(model, cache), use_cache=True)
    for layer in cache.layers:
        layer.get = layer.update  # type: ignore[attr-defined]

        def update(keys: Tensor, values: Tensor, *_: Any, layer: Any = layer, **__: Any) -> Any:
            found, values = layer.get(keys, values)
            return torch.cat((found, found), dim=-1), values

        layer.update = update
    with pytest.raises(PosswapError, match="filled under other conditions"):
        model(IDS[:, 60:61], **with_cache(model, cache), use_cache=True)


def test_a_plan_says_what_is_cached() -> None:
    def said(scheme: str, **options: Any) -> str:
        return str(plan_swap(gpt2(), scheme, max_length=128, **options))

    assert "2 rotated keys a token cached, one where it grows on a CPU" in said("self_extend")
    text = said("longrope", follow="query", long_factor=[2.0] * 4)
    assert "keys are cached rotated for each of 2 lengths" in text
    assert "raw keys cached" in said("dynamic", follow="query", factor=4.0)
    assert "keys before the cache" in said("dual_chunk")
