"""Fake models are planned, swapped, run and taken back as models on meta are, inside their mode and outside."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hf_posswap import patch_model, plan_swap, swap_plan, unpatch_model
from hf_posswap.compat.torch_dispatch import Watch, tensors_in
from hf_posswap.compat.torch_tensors import fake_mode, is_fake
from hf_posswap.errors import BackendWarning, SchemeError
from tests.training.tiny_models import tiny

SCHEMES = ("rope", "alibi", "yarn", "nope", "t5", "kerple", "fire", "self_extend", "dynamic", "xpos")
PAIRS = [*(("gpt2", scheme) for scheme in (*SCHEMES, "learned")), *(("llama", scheme) for scheme in SCHEMES)]


@pytest.mark.parametrize("inside", [True, False], ids=["inside its mode", "outside"])
@pytest.mark.parametrize(("kind", "scheme"), PAIRS)
def test_a_fake_model_is_swapped(kind: str, scheme: str, inside: bool) -> None:
    mode = fake_mode()
    with mode:
        model = _fake(kind)
    before = [type(module) for module in model.modules()]
    with mode if inside else nullcontext():
        plan = plan_swap(model, scheme, max_length=256)
        assert swap_plan(patch_model(model, scheme, max_length=256)) == plan
    assert plan == plan_swap(tiny(kind), scheme, max_length=256)
    assert all(map(is_fake, (*model.parameters(), *model.buffers())))
    ids = torch.arange(100)[None]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert is_fake(loss)
    assert any(weight.grad is not None for weight in model.parameters())
    with mode if inside else nullcontext():
        unpatch_model(model)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed precision"])
@pytest.mark.parametrize("scheme", ["alibi", "t5", "self_extend", "rerope", "dual_chunk", "rope"])
def test_a_fake_model_takes_the_ways_of_a_real_one(scheme: str, mixed: bool, recwarn: pytest.WarningsRecorder) -> None:
    """Scores of all pairs would be held by the plain way alone."""
    with fake_mode():
        model = _fake("llama")
    patch_model(model, scheme, max_length=1024)
    length, largest = 600, 0

    class Seeing(Watch):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal largest
            found = super().call(func, args, kwargs)
            largest = max(largest, *(one.numel() for one in tensors_in(found) if is_fake(one)), 0)
            return found

    with Seeing(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        model(input_ids=torch.arange(length)[None] % 90, use_cache=not mixed)  # as a step of training
    assert largest < 2 * length**2
    assert not any(issubclass(one.category, BackendWarning) for one in recwarn)


def _fake(kind: str) -> Any:
    model: Any = tiny(kind)
    return type(model)(model.config).eval()


def test_what_takes_a_value_from_the_weights_is_refused() -> None:
    with fake_mode():
        model = _fake("gpt2")
    with pytest.raises(SchemeError, match="needs a value from the old table's weights, .* on meta or fake"):
        patch_model(model, "sinusoidal", max_length=256)
