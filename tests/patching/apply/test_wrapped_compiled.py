"""Compiled models: what was compiled in place is compiled again after a swap, and nothing of another swap is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from hf_posswap import patch_model, unpatch_model, verify_swap
from hf_posswap.families.locating import locate
from tests.contract.models import build
from tests.contract.pairs import CHANGE, NOISE, gap, logits, words

pytestmark = pytest.mark.slow

IDS = words(2, 24)
SWAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "rope": ("rope", {"site": "attention"}),
    "rope of another base": ("rope", {"site": "attention", "base": 50000.0}),
    "linear by 2": ("linear", {"factor": 2.0}),
    "linear by 4": ("linear", {"factor": 4.0}),
    "alibi": ("alibi", {}),
    "nope": ("nope", {}),
    "xpos": ("xpos", {}),
    "self_extend": ("self_extend", {}),
    "t5": ("t5", {"init_std": 1.0}),
    "sinusoidal": ("sinusoidal", {}),
    "learned": ("learned", {}),
}
ORDERS = {
    "gpt2": ("rope", "alibi", "rope of another base", "t5", "learned"),
    "llama": ("linear by 2", "xpos", "linear by 4", "self_extend", "nope"),
    "bert": ("sinusoidal", "rope", "rope of another base"),
}


def swap(model: Any, what: str) -> None:
    torch.manual_seed(3)  # a scheme may begin with random numbers
    scheme, options = SWAPS[what]
    patch_model(model, scheme, **{"max_length": 64, **options})


def compiled_in_place(model: Any, counter: CompileCounter) -> Any:
    model.compile(backend=counter)
    return model


def attention_compiled_in_place(model: Any, counter: CompileCounter) -> Any:
    for path in locate(model).attention:
        model.get_submodule(path).compile(backend=counter)
    return model


@pytest.fixture(autouse=True)
def _from_scratch() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


@pytest.mark.parametrize("how", [compiled_in_place, attention_compiled_in_place])
@pytest.mark.parametrize("name", list(ORDERS))
def test_compiled_then_swapped_again_and_again(name: str, how: Any) -> None:
    expected, native, counter = {}, logits(build(name), IDS), CompileCounter()
    for what in ORDERS[name]:
        plain = build(name)
        swap(plain, what)
        expected[what] = logits(plain, IDS)
    model = how(build(name), counter)
    assert gap(logits(model, IDS), native) < NOISE
    begun = counter.frame_count
    assert begun > 0
    for what in ORDERS[name]:
        swap(model, what)
        assert gap(logits(model, IDS), expected[what]) < NOISE, what
        assert gap(expected[what], native) > CHANGE or what in ("rope", "learned")
        unpatch_model(model)
        assert gap(logits(model, IDS), native) < NOISE, f"after {what}"
    assert counter.frame_count > begun


def test_a_compiled_model_is_verified_and_decodes() -> None:
    model = compiled_in_place(build("llama"), CompileCounter())
    logits(model, IDS)
    swap(model, "alibi")
    verify_swap(model)
    plain = build("llama")
    swap(plain, "alibi")
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert model.generate(IDS, **options).tolist() == plain.generate(IDS, **options).tolist()


def test_what_the_compiler_wrapped_runs_the_swap_of_the_model_inside() -> None:
    model = build("gpt2")
    wrapper = torch.compile(model, backend="eager")
    before = logits(wrapper, IDS)
    swap(model, "alibi")
    plain = build("gpt2")
    swap(plain, "alibi")
    assert gap(logits(wrapper, IDS), logits(plain, IDS)) < NOISE
    unpatch_model(model)
    assert gap(logits(wrapper, IDS), before) < NOISE


def test_a_cast_after_compiling_keeps_the_angles() -> None:
    """A native swap's rotary module gives back angles that a cast blurred, compiled too."""

    def cast(model: Any) -> Tensor:
        return logits(model.to(torch.bfloat16), IDS)

    model, plain = compiled_in_place(build("llama"), CompileCounter()), build("llama")
    logits(model, IDS)
    for one in (model, plain):
        swap(one, "linear by 2")
        logits(one, IDS)
    assert gap(cast(model), cast(plain)) == 0
