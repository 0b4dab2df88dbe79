"""Bounds on what speaks to the Hub: how long a silence may last, how often a failure is tried again, how long at most.

The Hub's client waits for a stalled server without end, tries an unreachable one for half a minute with two lines each
time, and waits as long as a server tells it to. Inside `hub_session` each request of the client that the process shares
is bounded: the answer to a question, about a repository or a file, is whole after half a minute and has at
most 32 MiB; all the time that such answers take beyond two seconds each adds up to half a minute at most. A download
may take as long as it likes while it flows: 1 KiB a second, over each 20 s of waiting for it.
"""

from __future__ import annotations

import contextvars
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakSet

from hf_posswap.errors import PosswapError
from hf_posswap.utils.format import said_by
from hf_posswap.utils.threads import once

LARGEST = 32 << 20
"""Bytes of an answer that is read into memory: a thousand times those of the longest list of files on the Hub."""
FLOOR, WINDOW = 1024, 20.0
"""Bytes a second, over so many seconds, that a download has at least."""
_POLL = 1.0
_DEEP = 200  # brackets, below which no answer can be nested too deeply to be read
Reader = TypeVar("Reader", bound=Callable[..., Any])
T = TypeVar("T")
_RETRIED = (429, 500, 502, 503, 504)
_TRIES = 4
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
_CONNECT, _SILENCE, _WORK = 5.0, 20.0, 120.0
"""Seconds: to be connected, until the answer to a question begins, and to what makes the Hub work."""
_ANSWER, _USUAL = 30.0, 2.0
"""Seconds: until the answer to a question is whole; those that answers may take, before the rest is added up."""
_PAGES = 1000
"""Answers to one question: a list of files comes in pages of a thousand."""
_LIBRARIES = ("httpx", "httpx2")


class _Address(Protocol):
    """Where a request goes."""

    host: str
    path: str


class _Request(Protocol):
    """A request of the client, as far as it is looked at here."""

    method: str
    url: _Address
    stream: Iterable[bytes]
    extensions: Mapping[str, Any]
    content: bytes | None


class _Response(Protocol):
    """The response to a request, as far as it is looked at here."""

    status_code: int
    headers: Mapping[str, str]
    request: _Request
    stream: Iterable[bytes]
    iter_bytes: Callable[..., Iterator[bytes]]
    read: Callable[[], bytes]
    close: Callable[[], None]


class _ObservedStream(Protocol):
    """An instance of what `observed_stream` returns."""

    stream: Iterable[bytes]
    observe: Callable[[int, float], None]


class BadAnswerError(Exception):
    """An answer goes beyond a bound; the message says which, after the name of the server."""


def call_in_time(work: Callable[[], T], left: Callable[[], float]) -> T:
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


def read_answer(response: _Response) -> _Response:
    """Return `response` with its content read, unless that is too large or nested too deeply.

    Raises:
        BadAnswerError: it is.
    """
    pieces = response.iter_bytes

    def bounded(*args: object, **kwargs: object) -> Iterator[bytes]:
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


@dataclass(eq=False)
class Flow:
    """The bytes that a download has brought, and the time that was spent waiting for them; slower than a floor it ends.

    Example:
        >>> flow = Flow()
        >>> flow.add(100, 19.0)
        >>> flow.add(100, 2.0)
        Traceback (most recent call last):
        ...
        hf_posswap.utils.hub_session.BadAnswerError: sent less than 1024 bytes a second for 21 s
    """

    size: int = 0
    waited: float = 0.0

    def add(self, size: int, waited: float) -> None:
        """Count a piece of `size` bytes that came after `waited` seconds."""
        self.size, self.waited = self.size + size, self.waited + waited
        if self.waited < WINDOW:
            return
        if self.size < FLOOR * self.waited:
            raise BadAnswerError(f"sent less than {FLOOR} bytes a second for {self.waited:.0f} s")
        self.size, self.waited = 0, 0.0


@cache
def observed_stream(library: ModuleType) -> Callable[..., Iterable[bytes]]:
    """Return a class of streams that call, with each piece, `observe(its bytes, the seconds until it came)`.

    At their end they call `observe(0, ...)`.
    """

    def __init__(self: _ObservedStream, stream: Iterable[bytes], observe: Callable[[int, float], None]) -> None:
        self.stream, self.observe = stream, observe

    def __iter__(self: _ObservedStream) -> Iterator[bytes]:
        began = time.monotonic()
        for piece in self.stream:
            self.observe(len(piece), time.monotonic() - began)
            yield piece
            began = time.monotonic()
        self.observe(0, time.monotonic() - began)

    def close(self: _ObservedStream) -> None:
        if hasattr(self.stream, "close"):
            self.stream.close()

    body = {"__init__": __init__, "__iter__": __iter__, "close": close}
    return type("ObservedStream", (library.SyncByteStream,), body)


def retry_after(headers: Mapping[str, str]) -> float | None:
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


class HubSession:
    """The bounds of the requests in one block, and what is known of the Hub in it.

    Attributes:
        commit_sent: whether a commit was sent, so that it may be there although no answer came.
        others: the threads that ran before the block, but for its own: it bounds none of them.
        silent: whether a request that was sent was given up because no answer came in time.
    """

    def __init__(self, timeout: float | None) -> None:
        self.commit_sent = self.silent = False
        self.others = WeakSet(threading.enumerate())
        self.others.discard(threading.current_thread())
        self._timeout = math.inf if timeout is None else timeout
        self._end = time.monotonic() + self._timeout
        self._unreachable: dict[str, str] = {}
        self._tries: Counter[str] = Counter()
        self._asked: Counter[tuple[str, str]] = Counter()
        self._patience = _ANSWER

    @property
    def reason(self) -> str | None:
        """Why nothing more is asked of a host; None: every host can be asked."""
        return "; ".join(dict.fromkeys(self._unreachable.values())) or None

    def extend(self, seconds: float) -> None:
        """Let requests take `seconds` from now, whatever was left: to ask what became of the last one."""
        self._end = max(self._end, time.monotonic() + seconds)
        self._unreachable.clear()

    def send(self, send: Callable[..., _Response], request: _Request, **how: Any) -> _Response:
        """Return the response to `request`, tried again where that may help; `send` is the client's own.

        Raises:
            HubUnreachable: no answer came in time.
            HfHubHTTPError: the Hub failed at each try, or asks to wait too long.
        """
        from huggingface_hub.utils import hf_raise_for_status

        commit = request.method == "POST" and "/commit/" in request.url.path
        rewound_by_client = not _in_memory(request)  # a file: the client itself goes back to its start and tries again
        body = request.stream
        for number in range(1, _TRIES + 1):
            tries = self._tries[str(request.url)] = self._tries[str(request.url)] + 1 if rewound_by_client else number
            last = tries >= _TRIES
            self.commit_sent = self.commit_sent or commit
            try:
                response: Any = self._send_once(send, request, body, **how)
            except _library(request).TransportError as error:
                wait = self._wait_after(error, request, last=last or commit, number=number)
                if rewound_by_client:
                    raise
            else:
                if response.status_code not in _RETRIED:
                    return response
                wait = retry_after(response.headers) or _FIRST_WAIT * 2 ** (number - 1)
                give_up = last or (commit and response.status_code != 429)
                if give_up or wait > min(_LONGEST_WAIT, self._end - time.monotonic()):
                    response.read()
                    hf_raise_for_status(response)
                if rewound_by_client:
                    return response
                response.close()
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _send_once(
        self,
        send: Callable[..., _Response],
        request: _Request,
        body: Iterable[bytes],
        *,
        stream: bool = False,
        **how: object,
    ) -> _Response:
        host = request.url.host
        if host in self._unreachable:
            raise _unreachable(self._unreachable[host])
        # bound how long the server may be silent, while it is connected to and after that
        left, silence = self._left(), _SILENCE if _is_question(request) else _WORK
        client_timeout = request.extensions.get("timeout", {})
        bounds = {name: min(client_timeout.get(name) or silence, silence, left) for name in ("read", "write", "pool")}
        request.extensions = {**request.extensions, "timeout": {"connect": min(_CONNECT, left), **bounds}}
        limit, began = self._limit(request), time.monotonic()
        sent = [began]  # when the last piece of the request went out

        def observe_request(size: int, waited: float) -> None:
            self._left()
            sent[0] = time.monotonic()

        def left_for_answer() -> float:
            seconds = sent[0] + limit - time.monotonic()
            if seconds <= 0:
                self.silent = True
                raise BadAnswerError(f"did not finish an answer within {limit:.3g} s")
            return min(seconds, self._left())

        request.stream = observed_stream(_library(request))(body, observe_request)
        try:
            self._count(request)
            response = call_in_time(lambda: _exchange(send, request, stream, how), left_for_answer)
        except BadAnswerError as error:
            raise self._given_up(host, error) from error
        finally:
            if _is_question(request):
                self._patience -= max(0.0, time.monotonic() - began - _USUAL)
        if stream and response.status_code < 400:
            response.stream = observed_stream(_library(request))(response.stream, self._observe_download(host))
        return response

    def _limit(self, request: _Request) -> float:
        """Return the seconds from the end of `request` until its answer is whole, or of a download, its beginning."""
        return min(_ANSWER, max(self._patience, 0.0) + _USUAL) if _is_question(request) else _WORK

    def _count(self, request: _Request) -> None:
        """Refuse to ask for page after page of a list that has no end."""
        question = (request.method, f"{request.url.host}{request.url.path}")
        self._asked[question] += 1
        if self._asked[question] > _PAGES:
            raise BadAnswerError(f"gave more than {_PAGES} answers to one question, {request.url.path}")

    def _observe_download(self, host: str) -> Callable[[int, float], None]:
        flow = Flow()

        def observe(size: int, waited: float) -> None:
            self._left()
            try:
                flow.add(size, waited)
            except BadAnswerError as error:
                raise self._given_up(host, error) from error

        return observe

    def _given_up(self, host: str, error: BadAnswerError) -> Exception:
        """Return the error that says why nothing more is asked of `host`."""
        self._unreachable[host] = f"{host} {error}"
        return _unreachable(self._unreachable[host])

    def _left(self) -> float:
        """Return the seconds that are left."""
        left = self._end - time.monotonic()
        if left <= 0:
            self.silent = True
            raise _unreachable(f"it took longer than timeout={self._timeout:g} s")
        return left

    def _wait_after(self, error: Exception, request: _Request, *, last: bool, number: int) -> float:
        """Return the seconds to wait after `error` before the next try; after the last one, raise."""
        library, host = _library(request), request.url.host
        self._left()
        if isinstance(error, library.TimeoutException):
            connecting = isinstance(error, library.ConnectTimeout)
            bounds = request.extensions["timeout"]
            self.silent = self.silent or not connecting
            self._unreachable[host] = (
                f"{host} cannot be reached" if connecting else f"{host} said nothing for {bounds['read']:.3g} s"
            )
        elif isinstance(error, library.ConnectError):
            if number == 1:
                return _FIRST_WAIT / 2
            self._unreachable[host] = f"{host} cannot be reached ({error})"
        elif not last:
            return _FIRST_WAIT * 2 ** (number - 1)
        raise _unreachable(self._unreachable.get(host) or f"{host} ended the connection in the middle") from error


_lock = threading.RLock()


_open: list[HubSession] = []


_own = threading.local()


@contextmanager
def hub_session(timeout: float | None = None) -> Iterator[HubSession]:
    """Bound every request to the Hub in the block, also those of threads that the client starts for it.

    The innermost block of a thread counts. Threads that ran before are not bounded by it.

    Args:
        timeout: seconds for all requests together; None: as long as the Hub answers.
    """
    from huggingface_hub.utils import http_backoff

    session, outer = HubSession(timeout), getattr(_own, "session", None)
    logging.getLogger(http_backoff.__module__).addFilter(_is_logged)  # it logs each try; one error is enough
    with _lock:
        _open.append(session)
        client = _bound_client()
    _own.session = session
    try:
        yield session
    finally:
        _own.session = outer
        with _lock:
            _open.remove(session)
            if not _open:
                client.__dict__.pop("send", None)


def why_not_found(source: object, error: BaseException | None = None) -> str:
    """Return why nothing was read of a folder or Hub id: there is no such folder, and what the Hub said, if asked.

    Args:
        source: as the user named it.
        error: what reading it raised.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    reason = "" if error is None else said_by(error)
    if Path(str(source)).exists():
        return reason
    if not HF_HUB_OFFLINE or not (error is None or "couldn't connect" in reason):
        return f"there is no such folder here, and the Hub gave none. {reason}".rstrip()
    name = "HF_HUB_OFFLINE" if "HF_HUB_OFFLINE" in os.environ else "TRANSFORMERS_OFFLINE"
    return (
        f"there is no such folder here, and the Hub was not asked, because {name} is set. Correct the name, or unset "
        f"{name} to ask the Hub."
    )


def hub_reading(function: Reader) -> Reader:
    """Return `function` with bounded reads from the Hub; inside another such function the outer bounds hold."""

    @wraps(function)
    def bounded(*args: object, **kwargs: object) -> object:
        if getattr(_own, "session", None) is not None:
            return function(*args, **kwargs)
        with hub_session() as session:
            try:
                return function(*args, **kwargs)
            except PosswapError as error:
                reason = session.reason
                if reason is not None and reason not in str(error):  # transformers speaks of being offline
                    error.args = (f"{error} The Hub: {reason}.", *error.args[1:])
                raise

    return cast("Reader", bounded)


def _bound_client() -> object:
    """Return the client that the process shares, its `send` bounded by the session that is open."""
    from huggingface_hub.utils import get_session

    client: Any = get_session()
    if "send" not in client.__dict__:
        send = client.send

        def bounded(request: _Request, **how: object) -> _Response:
            session = _session_here()
            return send(request, **how) if session is None else session.send(send, request, **how)

        client.send = bounded
    return client


def _session_here() -> HubSession | None:
    """Return the session that bounds the requests of this thread: its own, or the innermost that was open before it."""
    session: HubSession | None = getattr(_own, "session", None)
    if session is not None:
        return session
    thread = threading.current_thread()
    with _lock:
        return next((session for session in reversed(_open) if thread not in session.others), None)


def _is_logged(record: logging.LogRecord) -> bool:
    """Return whether what the client logs in this thread is shown: within a session only what is critical."""
    return record.levelno >= logging.CRITICAL or _session_here() is None


def _unreachable(reason: str) -> Exception:
    """Return the error of a Hub that does not answer; its client treats it as offline, and uses its cache."""
    return unreachable_error()(f"{reason}.")


@once
def unreachable_error() -> type[Exception]:
    """Return the class of the error that a Hub which does not answer raises in a session."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return type("HubUnreachable", (OfflineModeIsEnabled,), {"__module__": __name__})


def _library(request: _Request) -> ModuleType:
    """Return the module of the client that `request` belongs to: httpx, or its successor."""
    roots = (base.__module__.partition(".")[0] for base in type(request).__mro__)
    return next(sys.modules[root] for root in roots if root in _LIBRARIES)


def _is_question(request: _Request) -> bool:
    return request.method in ("GET", "HEAD")


def _exchange(send: Callable[..., _Response], request: _Request, stream: bool, how: dict[str, object]) -> _Response:
    """Return the response to `request`, read to its end unless it is a download."""
    response = send(request, stream=True, **how)
    try:
        return response if stream and response.status_code < 400 else read_answer(response)
    except BaseException:
        response.close()
        raise


def _in_memory(request: _Request) -> bool:
    try:
        return request.content is not None
    except _library(request).RequestNotRead:
        return False
