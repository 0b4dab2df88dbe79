"""Bounds on one answer of a Hub: what it asks to wait, its size and depth, its time."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_posswap.utils.hub_session import BadAnswerError, Flow, call_in_time, retry_after


@given(asked=st.text(), rate=st.text())
@example(asked="\xb2", rate="")
@example(asked="9" * 5000, rate="")
@example(asked="Mon, 01 Jan 0001 00:00:00 +2359", rate="")
@example(asked="Fri, 31 Dec 9999 23:59:59 -2359", rate="")
@example(asked="", rate="r=0;t=\u0663")
@example(asked="", rate="r=0;t=" + "9" * 5000)
def test_whatever_a_server_asks_is_a_number_of_seconds_or_nothing(asked: str, rate: str) -> None:
    found = retry_after({"retry-after": asked, "ratelimit": rate})
    assert found is None or 0 <= found < 1e12


def test_a_call_that_never_ends_is_left_when_time_is_up() -> None:
    never, ends = threading.Event(), time.monotonic() + 0.2

    def left() -> float:
        if time.monotonic() > ends:
            raise BadAnswerError("is late")
        return 0.05

    with pytest.raises(BadAnswerError, match="is late"):
        call_in_time(lambda: never.wait(60), left)
    assert time.monotonic() < ends + 5
    never.set()


def test_a_call_raises_what_its_work_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        call_in_time(lambda: 1 // 0, lambda: 10.0)


def test_a_download_may_stop_and_go_while_its_mean_is_above_the_floor() -> None:
    flow = Flow()
    for _ in range(100):
        flow.add(30_000, 19.0)
    for _ in range(10**4):
        flow.add(1, 0.0001)
    flow.add(1, 10.0)
    with pytest.raises(BadAnswerError, match="sent less than 1024 bytes a second"):
        flow.add(1, 10.0)
