"""Bounds on one answer of a server: how long it may take, how large and how deep it may be, how slowly it may flow."""

from __future__ import annotations

import contextvars
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

LARGEST = 32 << 20
"""Bytes of an answer that is read into memory: a thousand times those of the longest list of files on the Hub."""
FLOOR, WINDOW = 1024, 20.0
"""Bytes a second, over so many seconds, that a download has at least."""
_POLL = 1.0
_DEEP = 200  # brackets, below which no answer can be nested too deeply to be read


class BadAnswerError(Exception):
    """An answer goes beyond a bound; the message says which, after the name of the server."""


def call_in_time(work: Callable[[], Any], left: Callable[[], float]) -> Any:
    """Return what `work` returns, or raise what it raises, if that comes while time is left.

    It runs in a separate thread, because a server that sends a byte now and then keeps a client waiting inside one
    call. When time is up, the thread is abandoned, and a late response is closed.

    Args:
        work: returns a response.
        left: returns the seconds that are left, or raises.

    Example:
        >>> call_in_time(lambda: 3, lambda: 10.0)
        3
    """
    done, abandoned, outcome = threading.Event(), threading.Event(), dict[str, Any]()

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error
        done.set()
        if abandoned.is_set() and hasattr(outcome.get("value"), "close"):
            outcome["value"].close()

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True, name="hub request").start()
    try:
        while not done.wait(min(max(left(), 0.0), _POLL)):
            pass
    except BaseException:
        abandoned.set()
        if done.is_set() and hasattr(outcome.get("value"), "close"):
            outcome["value"].close()
        raise
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def read_answer(response: Any) -> Any:
    """Return `response` with its content read, unless that is too large or nested too deeply.

    Raises:
        BadAnswerError: it is.
    """
    pieces = response.iter_bytes

    def bounded(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        size = 0
        for piece in pieces(*args, **kwargs):
            size += len(piece)
            if size > LARGEST:
                raise BadAnswerError(f"answered {response.request.url.path} with more than {LARGEST >> 20} MiB")
            yield piece

    response.iter_bytes = bounded  # which `read` calls
    content = response.read()
    if content.count(b"[") + content.count(b"{") > _DEEP:
        try:
            json.loads(content)
        except RecursionError as error:
            raise BadAnswerError(f"answered {response.request.url.path} with JSON that is nested too deeply") from error
        except ValueError:
            pass  # whoever asked finds that out
    return response


class Flow:
    """The bytes that a download has brought, and the time that was spent waiting for them; slower than a floor it ends.

    Example:
        >>> flow = Flow()
        >>> flow.add(100, 19.0)
        >>> flow.add(100, 2.0)
        Traceback (most recent call last):
        ...
        hf_posswap.utils.hub_answers.BadAnswerError: sent less than 1024 bytes a second for 21 s
    """

    def __init__(self) -> None:
        self.size, self.waited = 0, 0.0

    def add(self, size: int, waited: float) -> None:
        """Count a piece of `size` bytes that came after `waited` seconds."""
        self.size, self.waited = self.size + size, self.waited + waited
        if self.waited < WINDOW:
            return
        if self.size < FLOOR * self.waited:
            raise BadAnswerError(f"sent less than {FLOOR} bytes a second for {self.waited:.0f} s")
        self.size, self.waited = 0, 0.0


@cache
def observed_stream(library: Any) -> Callable[..., Any]:
    """Return a class of streams that call, with each piece, `observe(its bytes, the seconds until it came)`.

    At their end they call `observe(0, ...)`.
    """

    def __init__(self: Any, stream: Any, observe: Callable[[int, float], None]) -> None:
        self.stream, self.observe = stream, observe

    def __iter__(self: Any) -> Iterator[bytes]:
        began = time.monotonic()
        for piece in self.stream:
            self.observe(len(piece), time.monotonic() - began)
            yield piece
            began = time.monotonic()
        self.observe(0, time.monotonic() - began)

    def close(self: Any) -> None:
        if hasattr(self.stream, "close"):
            self.stream.close()

    body = {"__init__": __init__, "__iter__": __iter__, "close": close}
    return type("ObservedStream", (library.SyncByteStream,), body)


def retry_after(headers: Any) -> float | None:
    """Return the seconds that a server asks to wait, as a number, as a date, or as the rest of a rate's window.

    Anything else counts as no request to wait.

    Example:
        >>> retry_after({"retry-after": "7"}), retry_after({"ratelimit": '"api";r=0;t=55'}), retry_after({})
        (7.0, 55.0, None)
    """
    header = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", header):
        return float(header)
    if header:
        try:
            moment = parsedate_to_datetime(header)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            return max(0.0, (moment - datetime.now(UTC)).total_seconds())
        except (ValueError, OverflowError, TypeError, IndexError):
            return None
    window = re.search(r"\br=0\s*;\s*t=([0-9]{1,9})\b", headers.get("ratelimit", ""))
    return float(window[1]) if window else None
