"""No tensor on another device, and none of another dtype: swapped models on an accelerator that is not there.

Fake tensors of a device refuse to meet a CPU's, as real ones do. A build of torch without CUDA can neither index nor
differentiate those of "cuda"; those of "lazy", a device that it has, stand for them. They know no autocast: mixed
precision runs on fake tensors of the CPU, as the dry run of a training has it. No number of a fake tensor can be read:
`generate`, which does, runs on a CPU while every tensor that is made without a device lies on meta.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posswap.compat.torch_tensors import cannot_be_fake, fake_mode, is_fake
from hf_posswap.patching.sites.attention import positions
from hf_posswap.schemes import schemes_for
from hf_posswap.training.dryrun.unreal import as_on_gpu
from hf_posswap.utils.devices import standing_for
from tests.contract.pairs import Pair, refusal, words
from tests.stock import RELEASE, cache_in, takes_cache, with_cache

FAST, SLOW = ("gpt2", "llama"), ("bloom", "bert", "t5", "bart")
"""A learned table; RoPE with grouped heads; ALiBi; an encoder; a bias of its own; two learned tables."""
FAMILIES = [*FAST, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]
ROTATED_FIRST = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gpt2", *SLOW))]
"""In mixed precision rotations widen what they turn."""
SCHEMES = schemes_for("text")
ATTENTION = ["sdpa", pytest.param("eager", marks=pytest.mark.slow)]
PROMPT = words(2, 20)


def pair_of(family: str, scheme: str) -> Pair:
    pair = Pair(family, scheme)
    if (family, scheme) == ("bart", "longrope"):
        pytest.skip("a number a pair: its stacks' heads differ")
    if (family, scheme) == ("t5", "together"):
        pytest.skip("it needs a table")
    if (reason := refusal(pair)) is not None:
        pytest.skip(reason.splitlines()[0])
    return pair


def inputs(model: Any, device: str, length: int = PROMPT.shape[1]) -> dict[str, Tensor]:
    """Return two texts, the first `length` tokens of them where a decoder reads."""
    ids = PROMPT.to(device)
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :length]}
    return {"input_ids": ids[:, :length]}


def kinds(found: Any) -> list[tuple[str, torch.dtype]]:
    """Return the device and the dtype of the logits, and of all that the cache holds."""
    cache = cache_in(found)
    cache = getattr(cache, "self_attention_cache", cache)
    held = [tensor for layer in getattr(cache, "layers", []) for tensor in (layer.keys, layer.values)]
    return [(tensor.device.type, tensor.dtype) for tensor in (found.logits, *held)]


def run(model: Any, device: str) -> tuple[Any, dict[str, Any]]:
    """Return the kinds of what a forward, a padded one and steps of decoding give, and of each gradient.

    With sdpa stock code reads whether a mask hides anything.
    """
    given = inputs(model, device)
    mask = torch.ones(PROMPT.shape, dtype=torch.long, device=device)
    masks = ({}, {"attention_mask": mask}) if model.config._attn_implementation == "eager" else ({},)
    found = []
    with torch.no_grad():
        for masked in masks:
            out = model(**given, **masked)
            found.append(kinds(out))
            for _ in range(2 if takes_cache(type(model)) else 0):
                assert cache_in(out) is not None
                out = model(**inputs(model, device, 1), **with_cache(model, cache_in(out)), use_cache=True)
                found.append(kinds(out))
    model.train()
    model(**given, labels=PROMPT.to(device), use_cache=False).loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return found, {name: grad if grad is None else (grad.device.type, grad.dtype) for name, grad in grads.items()}


def compare(pair: Pair, attention: str, way: str, run_as: Any) -> None:
    """Assert that the swapped model has all where its stock class has it, and in the same dtypes."""
    key = (pair.model, attention, way)
    if key not in _STOCK:
        try:
            _STOCK[key] = run_as(built(pair, attention))
        except RuntimeError as error:  # code of transformers 5.14 asks each device for its autocast
            if RELEASE >= (5, 18):
                raise
            _STOCK[key] = str(error)
    if isinstance(_STOCK[key], str):
        pytest.skip(f"the stock class cannot: {_STOCK[key]}")
    expected, stock_grads = _STOCK[key]
    model = built(pair, attention)
    pair.patch(model)
    own = {name for name, weight in model.named_parameters() if ".posswap." in f".{name}"}
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    try:
        found, grads = run_as(model)
    except cannot_be_fake():
        if pair.plan.route == "native":
            pytest.skip("stock code reads the length from the positions")
        raise
    assert found == expected
    assert sum(grad is not None for grad in grads.values()) > 10
    for name, grad in grads.items():
        if name in own:
            assert grad is not None, name
        elif name not in frozen:
            assert grad == stock_grads.get(name, grad), name


def make_fake(model: nn.Module, mode: Any) -> None:
    """Make all weights and buffers of `model` fake, where they lie; `Module.to` does so on its way to a device."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            fake = mode.from_tensor(weight.detach(), static_shapes=True)
            setattr(module, name, nn.Parameter(fake, requires_grad=weight.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, mode.from_tensor(buffer, static_shapes=True))


_STOCK: dict[tuple[str, str, str], Any] = {}


def built(pair: Pair, attention: str) -> Any:
    model = pair.native_with(attention)
    model.config.pad_token_id = None  # stock code looks for it in the ids, to warn
    return model


@pytest.fixture(autouse=True)
def plain_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the one question of a forward that reads a number: whether rows may share one row of positions."""
    if "generates" not in request.node.name:
        monkeypatch.setattr(positions, "_is_plain", lambda positions, index: False)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_an_accelerator_all_lies_there(family: str, scheme: str, attention: str) -> None:
    def run_there(model: Any) -> Any:
        with fake_mode(), standing_for("cuda"):
            model.to("lazy:0", torch.bfloat16)
            assert all(is_fake(tensor) and tensor.device.type == "lazy" for tensor in model.state_dict().values())
            return run(model, "lazy:0")

    compare(pair_of(family, scheme), attention, "bfloat16", run_there)


@pytest.mark.parametrize("half", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ROTATED_FIRST)
def test_mixed_precision_on_a_gpu_has_the_dtypes_of_the_stock_class(
    family: str, scheme: str, attention: str, half: str
) -> None:
    def run_mixed(model: Any) -> Any:
        with fake_mode() as mode, as_on_gpu(), torch.autocast("cpu", getattr(torch, half)):
            make_fake(model, mode)
            return run(model, "cpu")

    compare(pair_of(family, scheme), attention, f"mixed {half}", run_mixed)


def test_attention_as_on_a_gpu_is_of_its_thread_alone() -> None:
    original = functional.scaled_dot_product_attention
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=torch.bfloat16)
    expected = original(query, key, value, is_causal=True)
    with as_on_gpu(), ThreadPoolExecutor(1) as threads:
        found = threads.submit(lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        assert torch.equal(found.result(), expected)
    assert functional.scaled_dot_product_attention is original


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_runs_and_generates_where_its_input_lies(family: str, scheme: str) -> None:
    model = pair_of(family, scheme).swapped()
    expected, found = (said(model, context) for context in (nullcontext(), torch.device("meta")))
    assert [torch.equal(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)


def said(model: Any, context: Any) -> list[Tensor]:
    """Return loss, logits, a gradient and generated tokens, with `context` around what makes them."""
    model.zero_grad()
    mask = torch.ones_like(PROMPT)
    mask[0, :5] = 0
    given = inputs(model, "cpu")
    with context:
        loss = model(**given, labels=PROMPT).loss
        loss.backward()
        with torch.no_grad():
            padded = model(**given, attention_mask=mask).logits
            tokens = [model.generate(PROMPT, max_new_tokens=4, do_sample=False)] if model.can_generate() else []
    gradient = next(weight.grad for weight in model.parameters() if weight.grad is not None)
    return [loss.detach(), padded, gradient.clone(), *tokens]


def test_what_is_elsewhere_is_found() -> None:
    with fake_mode(), pytest.raises(RuntimeError, match="lazy"):
        torch.ones(2).to("lazy:0") + torch.ones(2)
    with torch.device("meta"), pytest.raises(RuntimeError):
        (torch.ones(2) + torch.ones(2, device="cpu")).tolist()
