"""Frames of running threads are read without a trace in them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from hf_posswap.compat.python_frames import self_of, stacks_of_threads


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


def test_stacks_of_threads_without_a_gil(steps: tuple[Steps, FrameType], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(stacks_of_threads()) > 1
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert stacks_of_threads() == {threading.get_ident(): sys._getframe()}
    steps[0].next()
    steps[0].next()
