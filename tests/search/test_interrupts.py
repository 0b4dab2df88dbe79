"""Ctrl-C inside the block waits for a check; where it has another meaning it keeps that."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from hf_posswap.training.search.fitness import Interrupts


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    held = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored
    yield
    signal.signal(signal.SIGINT, held)


def test_it_waits_for_the_check() -> None:
    steps = []

    def work() -> None:
        with Interrupts() as interrupts:
            interrupts.check()
            signal.raise_signal(signal.SIGINT)
            steps.append("after the signal")
            interrupts.check()
            steps.append("after the check")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_comes_at_the_end_where_no_check_does() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)


def test_an_error_in_the_block_is_the_one_that_is_seen() -> None:

    def work() -> None:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_one_s_own_is_left_alone() -> None:
    heard: list[int] = []

    def mine(number: int, _frame: object) -> None:
        heard.append(number)

    signal.signal(signal.SIGINT, mine)
    with Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGINT) is mine
        signal.raise_signal(signal.SIGINT)
        interrupts.check()
    assert heard == [signal.SIGINT]


def test_in_another_thread_it_does_nothing() -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            with Interrupts() as interrupts:
                interrupts.check()
        except ValueError as error:  # signal only works in the main thread
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
