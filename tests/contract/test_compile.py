"""torch.compile without a graph break, wherever the native model has none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model
from hf_posswap.testing.tiny import tiny_model
from tests.contract.models import LENGTH
from tests.contract.pairs import NOISE, Pair, gap, words
from tests.stock import with_cache

pytestmark = pytest.mark.slow

ALIKE = ("mvp", "blenderbot", "bigbird_pegasus", "marian", "led", "umt5", "longt5")
"""Encoder-decoders laid out as BART or T5 are; the own code of some breaks the graph of a step."""


def chosen(pair: Pair) -> bool:
    """Tracing takes seconds: every scheme in three models, and two schemes in every model but those of like code."""
    if pair.model in ALIKE:
        return False
    return pair.model in ("gpt2", "bert", "llama") or (pair.scheme in ("rope", "alibi") and pair.site == "auto")


IDS = words(2, LENGTH - 4)
BROKEN = ("ctrl", "dbrx")
"""Models whose own code breaks the graph."""
NOT_STATIC = ("bloom",)
"""Models whose own code runs in no static cache: its ALiBi is as long as the mask. Swapped, they do."""
NO_STEP = ("trocr",)
"""Models whose own step over a static cache breaks the graph: its decoder counts what the cache holds."""


def compiled(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(run, fullgraph=True, backend="eager")


def breaks(pair: Pair, run: Callable[[Any, Pair], Tensor]) -> str | None:
    """Return why `run` of the native model cannot be compiled into one graph, or cannot be run at all, or None."""
    return _breaks(replace(pair, scheme="", site="auto"), run)  # the native model knows of no scheme


@functools.cache
def _breaks(pair: Pair, run: Callable[[Any, Pair], Tensor]) -> str | None:
    try:
        with torch.no_grad():
            run(pair.native(), pair)
    except RuntimeError as error:  # those of torch.compile among them
        return str(error)
    return None


def branches(pair: Pair) -> bool:
    """Return whether stock transformers itself runs the swap, in a rotary module that may branch on the length."""
    rope = getattr(pair.specimen().config, "rope_parameters", None) or {}
    return pair.plan.route == "native" and rope.get("rope_type") in ("dynamic", "longrope")


def whole(model: Any, pair: Pair) -> Tensor:
    run = compiled(lambda given: model(**given, use_cache=False).logits)
    return run(pair.given(input_ids=IDS, attention_mask=torch.ones_like(IDS)))


def step(model: Any, pair: Pair) -> Tensor:
    """Return the logits of two static-cache decoding steps after a prefill, the steps compiled."""
    cache = pair.cache("static", model.config, LENGTH)
    start = pair.given(input_ids=IDS[:, :8], attention_mask=torch.ones(2, 8, dtype=torch.long))
    model(**start, **with_cache(model, cache))
    run = compiled(lambda given: model(**given, **with_cache(model, cache), use_cache=True).logits)
    mask = torch.zeros(2, LENGTH, dtype=torch.long)
    pieces = []
    for i in (8, 9):
        mask[:, : i + 1] = 1
        at = torch.full((2, 1), i)
        pieces.append(run(pair.given(input_ids=IDS[:, i : i + 1], attention_mask=mask.clone(), position_ids=at)))
    return torch.cat(pieces, dim=1)


@pytest.mark.pairs(lambda pair: pair.causal and chosen(pair))
def test_a_forward_compiles_into_one_graph(pair: Pair) -> None:
    assert (breaks(pair, whole) is None) == (pair.model not in BROKEN), "the native model was thought otherwise"
    if pair.model in BROKEN:
        return
    model = pair.swapped()
    if branches(pair):
        pytest.skip(f"stock transformers' own {pair.scheme} branches on the length")
    with torch.no_grad():
        assert gap(whole(model, pair), pair.logits(model, IDS)) < NOISE


@pytest.mark.pairs(lambda pair: not pair.causal and chosen(pair))
def test_an_encoder_compiles_into_one_graph(pair: Pair) -> None:
    model = pair.swapped()
    run = compiled(lambda given: model(**given).logits)
    with torch.no_grad():
        assert gap(run(pair.given(input_ids=IDS, attention_mask=torch.ones_like(IDS))), pair.logits(model, IDS)) < NOISE


@pytest.mark.pairs(lambda pair: pair.cached and chosen(pair))
def test_a_static_cache_step_compiles_into_one_graph(pair: Pair) -> None:
    fails = breaks(pair, step)
    assert (fails is None) == (pair.model not in (*BROKEN, *NOT_STATIC, *NO_STEP)), "thought otherwise"
    if pair.model in (*BROKEN, *NO_STEP):
        return
    if branches(pair):
        pytest.skip(f"stock transformers' own {pair.scheme} branches on the length")
    model = pair.swapped()
    with torch.no_grad():
        assert gap(step(model, pair), pair.logits(model, IDS[:, :10])[:, 8:]) < NOISE


def small_llama(scheme: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128,
    )  # fmt: skip
    return patch_model(LlamaForCausalLM(config), scheme, max_length=1024)


@pytest.mark.parametrize("scheme", ["self_extend", "rerope", "dual_chunk", "t5"])
def test_gradients_of_code_that_inductor_made_are_those_of_the_model(scheme: str) -> None:
    """Of 256 tokens, which Self-Extend's group of 11 does not divide: see `groups_of`."""
    model = small_llama(scheme)
    ids = torch.randint(64, (1, 256))
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=False)
    found = []
    for run in (model.forward, compiled):
        model.zero_grad()
        run(ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, atol=float(expected.abs().max()) * 1e-4, rtol=0)


@pytest.mark.parametrize("scheme", ["self_extend", "t5"])
@pytest.mark.parametrize("dynamic", [False, None])
def test_logits_of_code_that_inductor_made_are_those_of_the_model(scheme: str, dynamic: bool | None) -> None:
    """At several lengths, one graph for each or one for all."""
    model = small_llama(scheme).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for length in (200, 301):
            ids = torch.randint(64, (1, length))
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("mistral", "alibi"), ("qwen3", "self_extend"), ("gemma2", "t5"), ("bloom", "rope"), ("gptj", "alibi"),
        ("bert", "rope"), pytest.param("deepseek_v3", "rope", marks=pytest.mark.exhaustive),
        pytest.param("modernbert", "alibi", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_code_that_inductor_made_for_other_families_is_their_model(kind: str, scheme: str) -> None:
    """Logits and gradients of padded rows, and logits of a longer text by the same compiled model."""
    torch._dynamo.reset()
    model = patch_model(tiny_model(kind, meta=False), scheme, max_length=128)
    generator = torch.Generator().manual_seed(0)
    padded, longer = (torch.randint(5, 90, (2, length), generator=generator) for length in (60, 100))
    mask = torch.ones_like(padded)
    mask[0, :9] = 0
    found = []
    for run in (model, torch.compile(model)):
        model.zero_grad()
        logits = run(input_ids=padded, attention_mask=mask).logits
        logits.log_softmax(-1)[mask.bool()][:, 3].sum().backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        with torch.no_grad():
            far = run(input_ids=longer, attention_mask=torch.ones_like(longer)).logits
        found.append((logits.detach()[mask.bool()], gradient, far))
    (logits, gradient, far), (compiled_logits, compiled_gradient, compiled_far) = found
    torch.testing.assert_close(compiled_logits, logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(compiled_far, far, atol=1e-4, rtol=0)
    assert (compiled_gradient - gradient).norm() < 1e-4 * gradient.norm()
