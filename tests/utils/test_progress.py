"""The bar and the time that is left go by what steps cost, not by their number."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hf_posswap.utils import progress
from hf_posswap.utils.progress import Reporter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def quiet() -> tuple[Reporter, io.StringIO]:
    written = io.StringIO()
    return Reporter(Console(file=written, width=200)), written


def test_steps_of_the_same_cost_take_the_same_time(clock: list[float]) -> None:
    reporter, written = quiet()
    with reporter.task("a", 4) as task:
        clock[0] = 40.0
        task.advance(80, 1.25)
    assert written.getvalue() == "a: 1/4, 2 tokens/s,  loss 1.250, 120 s left\n"


def test_a_costly_step_that_is_still_to_come_takes_its_time(clock: list[float]) -> None:
    reporter, written = quiet()
    with reporter.task("a", 2, 10.0) as task:
        clock[0] = 40.0
        task.advance(80, None, 1.0)
        clock[0] = 400.0
        task.advance(800, None, 9.0)
    assert written.getvalue().splitlines() == ["a: 1/2, 2 tokens/s, 360 s left", "a: 2/2, 2 tokens/s, 0 s left"]


def test_what_was_done_before_has_no_part_in_the_rate(clock: list[float]) -> None:
    reporter, written = quiet()
    with reporter.task("a", 10) as task:
        task.skip(8)
        clock[0] = 30.0
        task.advance(30)
    assert written.getvalue() == "a: 9/10, 1 tokens/s, 30 s left\n"


def test_the_bar_of_a_terminal_goes_by_cost_and_counts_steps() -> None:
    written = io.StringIO()
    reporter = Reporter(
        Console(file=written, force_terminal=True, width=120, color_system=None, _environ={"TERM": "xterm"})
    )
    with reporter.task("a", 4, 10.0) as task:
        assert task.progress is not None
        bar = task.progress.tasks[0]
        task.skip(2)
        assert (bar.completed, bar.total, bar.fields["count"]) == (5.0, 10.0, "2/4")
        task.advance(8, None, 4.0)
        assert (bar.completed, bar.fields["count"]) == (9.0, "3/4")
    assert "3/4" in written.getvalue()
