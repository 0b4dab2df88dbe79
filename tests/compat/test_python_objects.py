"""Frames of running threads are read without a trace; a copy of a model runs what a library put on the model."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import json
import sys
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from hf_posswap.compat.python_objects import can_be_suspended, packages_of, rebound, self_of, stacks_of_threads
from hf_posswap.patching.verify.verify_swap import copy_sharing_weights
from tests.training.tiny_models import tiny


class Value:
    """What a frame holds for a while."""


class Steps:
    """A method that another thread runs, a step at a time."""

    def __init__(self) -> None:
        self.ready, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.value: Any = None
        self.locals: Any = None

    def wait(self) -> None:
        self.ready.release()
        assert self.go.acquire(timeout=60)

    def run_method(self) -> None:
        value = Value()
        self.value = weakref.ref(value)
        self.wait()
        value = None  # type: ignore[assignment]
        self.wait()
        self.locals = locals()
        self.wait()
        assert value is None

    def next(self) -> None:
        self.go.release()
        assert self.ready.acquire(timeout=60)


@pytest.fixture
def steps() -> Iterator[tuple[Steps, FrameType]]:
    steps = Steps()
    thread = threading.Thread(target=steps.run_method)
    thread.start()
    assert steps.ready.acquire(timeout=60)
    frame: Any = stacks_of_threads()[thread.ident or 0]
    while frame.f_code.co_name != "run_method":
        frame = frame.f_back
    yield steps, frame
    steps.go.release()
    thread.join(60)


def test_packages_of() -> None:
    def mine() -> None: ...

    assert packages_of(mine) == {"tests"}
    assert packages_of(torch.no_grad()(mine)) == {"torch", "tests"}
    assert packages_of(functools.wraps(json.dumps)(mine)) == {"json", "tests"}
    assert packages_of(Steps().wait) == packages_of(Steps()) == {"tests"}
    assert packages_of(json.dumps) == {"json"}
    assert packages_of(None) == set()


def test_self_of_leaves_nothing_in_the_frame(steps: tuple[Steps, FrameType]) -> None:
    """Else the next read would drop it, and the thread could end the frame in the midst of that read."""
    method, frame = steps
    assert self_of(frame) is method
    assert method.value() is not None
    method.next()
    assert method.value() is None
    assert self_of(frame) is method
    method.next()


def test_self_of_leaves_locals_that_their_function_holds(steps: tuple[Steps, FrameType]) -> None:
    method, frame = steps
    method.next()
    method.next()
    assert self_of(frame) is method
    assert method.locals["self"] is method


def test_self_of_leaves_the_body_of_a_class_alone() -> None:
    class Body:
        """Reads its own frame, whose locals are what the class will have."""

        self = "kept"
        found = self_of(sys._getframe())

    assert Body.found == Body.self == "kept"


@pytest.mark.parametrize("searched", [False, True])
def test_self_of_lets_the_search_for_garbage_go_on(searched: bool) -> None:
    before = gc.isenabled()
    (gc.enable if searched else gc.disable)()
    try:
        assert self_of(sys._getframe()) is None
        assert gc.isenabled() == searched
    finally:
        (gc.enable if before else gc.disable)()


def test_can_be_suspended_is_true_of_generators_and_coroutines() -> None:
    async def coroutine() -> FrameType:
        return sys._getframe()

    async def asynchronous() -> AsyncIterator[FrameType]:
        yield sys._getframe()

    async def first() -> FrameType:
        return await anext(asynchronous())

    suspended = next(sys._getframe() for _ in range(1))
    assert can_be_suspended(suspended)
    assert can_be_suspended(asyncio.run(coroutine()))
    assert can_be_suspended(asyncio.run(first()))
    assert not can_be_suspended(sys._getframe())


def test_a_suspended_generator_has_no_caller() -> None:
    """On that rests what the guard makes of a stack that ends in one."""
    generator = (sys._getframe() for _ in range(2))
    frame = next(generator)
    assert frame.f_back is None


def test_stacks_of_threads_without_a_gil(steps: tuple[Steps, FrameType], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(stacks_of_threads()) > 1
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert stacks_of_threads() == {threading.get_ident(): sys._getframe()}
    steps[0].next()
    steps[0].next()


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


def _by_global(model: Any) -> Any:  # as a cell of a notebook does
    names = {"stock": model.forward}
    exec("def forward(*args, **kwargs): return stock(*args, **kwargs).logits * 2", names)
    return names["forward"]


FORWARDS: list[Callable[[Any], Any]] = [_by_closure, _by_autocast, _by_partial, _by_global]


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
