"""A forward that another library put on a model runs the copy of that model."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_posswap.compat.python_functions import rebound
from hf_posswap.patching.verify.verify_swap import copy_sharing_weights
from tests.training.tiny_models import tiny


def _by_closure(model: Any) -> Any:  # as TRL puts a fused head on a model
    original = model.forward

    def forward(self: Any, *args: Any, scale: float = 2.0, **kwargs: Any) -> Any:
        return original(*args, **kwargs).logits * scale

    return types.MethodType(forward, model)


def _by_autocast(model: Any) -> Any:  # as accelerate does, on a model that TRL has changed
    from accelerate.utils import convert_outputs_to_fp32

    changed = _by_closure(model).__func__
    return types.MethodType(convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(changed)), model)


def _by_partial(model: Any) -> Any:  # as accelerate's hooks do
    def forward(module: Any, *args: Any, original: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs).logits * 2

    return functools.update_wrapper(functools.partial(forward, model, original=model.forward), model.forward)


FORWARDS: list[Callable[[Any], Any]] = [_by_closure, _by_autocast, _by_partial]


@pytest.mark.parametrize("put", FORWARDS)
def test_rebound_runs_the_copy_and_the_original_stays(put: Callable[[Any], Any]) -> None:
    model, ids = tiny("llama"), torch.arange(8)[None]
    model.forward = put(model)
    with torch.no_grad():
        before = model(ids)
        copied = copy_sharing_weights(model)
        assert torch.equal(copied(ids), before)
        copied.model.norm.weight = nn.Parameter(torch.zeros_like(model.model.norm.weight))
        assert copied(ids).abs().max() == 0
        assert torch.equal(model(ids), before)


def test_rebound_is_the_function_itself_that_holds_nothing_of_a_copy_is_itself() -> None:
    method = [].append
    for function in (len, method, _by_closure, functools.partial(len, ()), nn.Linear(1, 1), print):
        assert rebound(function, {id(object()): 1}) is function


def test_rebound_ends_at_a_function_that_holds_itself() -> None:
    def count(n: int) -> Any:
        return held if n == 0 else count(n - 1)

    held = [1]
    other = [2]
    assert rebound(count, {id(held): other})(0) == [2]
    assert count(0) == [1]
    assert copy.deepcopy(count) is count
