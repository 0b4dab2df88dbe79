"""What a file from anyone may hold, and what reading it must not do: hang, run code, leave its folder, die barely."""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hf_posswap.errors import PosswapError

BUDGETS = [pytest.param(20, id="short"), pytest.param(1500, id="long", marks=pytest.mark.slow)]
"""Examples of a test: few in every run, many with -m slow. They are the same ones each time; see `fuzz`."""
SECONDS = 20
_RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pty.spawn", "pickle.find_class")
_REACHES = ("socket.connect", "socket.getaddrinfo")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "shutil.rmtree")
CANARY = "canary"
"""A module in the folder that is read: whoever imports it leaves a file behind."""

_NESTED = "[" * 300 + "1" + "]" * 300
_DEEPEST = 12
"""Levels below which `mutated` changes nothing, so that nesting does not grow beyond what JSON is read at."""
WORDS = ("", " ", "x" * 5000, "../outside", "../outside/secret", "/etc/passwd", "~", "a\x00b", "\ud800", "nan", "1e999")
CODE = (f"{CANARY}.run", f"{CANARY}.Canary", f"{CANARY}--{CANARY}.Canary", "__import__('canary')", "${oops}", "{{ 1 }}")
NUMBERS = (-1, 0, 1, 3, 2**31, 2**70, -(2**70), 0.5, -0.0, 1e308, float("nan"), float("inf"))
scalars = st.sampled_from((None, True, False, *NUMBERS, *WORDS, *CODE))
values = st.one_of(
    scalars,
    st.sampled_from(("[]", "{}", "[[]]", "[null]", '{"": {}}', _NESTED)).map(json.loads),  # new ones: they are changed
    st.lists(scalars, max_size=3),
    st.dictionaries(st.sampled_from(("name", "a", "", "0", "__class__", "auto_map")), scalars, max_size=3),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if len(path) == _DEEPEST:
        return
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(children)[:40]:
        yield from _places(child, (*path, key))


@st.composite
def mutated(draw: Any, value: Any) -> Any:
    """Give `value`, JSON that is right, with one to three places of it changed, taken away or added."""
    found = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(found))
        if not places:
            return draw(values)
        *above, last = draw(st.sampled_from(places))
        inner = found
        for key in above:
            inner = inner[key]
        if draw(st.integers(0, 4)) == 0:
            del inner[last]
        elif isinstance(inner, dict) and draw(st.integers(0, 4)) == 0:
            inner[draw(st.sampled_from(("unknown", "", "name", "auto_map", "../outside")))] = draw(values)
        else:
            inner[last] = draw(values)
    return found


@st.composite
def damaged(draw: Any, whole: bytes) -> bytes:
    """Give `whole` with some bytes changed, cut off or put in."""
    found = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        kind = draw(st.sampled_from(("change", "cut", "insert")))
        if kind == "cut":
            del found[at:]
        elif kind == "insert":
            found[at:at] = draw(st.binary(max_size=16))
        elif found:
            found[at] = draw(st.integers(0, 255))
    return bytes(found)


class Hang(BaseException):
    """It took longer than anything may."""


class Watched:
    """Sees, while it is on, what this process does beyond reading.

    An audit hook cannot be taken away again, and slows all that follows: each `id()` and each step of `copy.deepcopy`
    calls it. So there is none before a test asks for it, and tests that do are the last (`conftest.py`).
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in _RUNS or event in _REACHES:
            self.seen.append(f"{event} {arguments!r:.200}")
        elif event == "os.truncate":
            self._look(event, arguments[0])
        elif event in _CHANGES:
            self._look(event, arguments[0], arguments[-1])  # the last one is a folder's descriptor, or -1
        elif event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes or "outside" in str(path):
                self._look(f"open {mode}", path)

    def _look(self, event: str, path: Any, base: Any = -1) -> None:
        if not isinstance(path, str | bytes | os.PathLike) or self.folder is None:
            return
        within = os.readlink(f"/proc/self/fd/{base}") if isinstance(base, int) and base >= 0 else ""
        whole = os.path.realpath(os.path.join(within, os.fsdecode(path)))
        if not whole.startswith((f"{self.folder}{os.sep}", "/dev/")) and whole != str(self.folder):
            self.seen.append(f"{event} {whole}")


_watched = functools.cache(Watched)


@contextmanager
def _bounded() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def plant(folder: Path) -> None:
    """Put a module into `folder` that tells when it is imported, and beside the folder a file that is not its own."""
    (folder / f"{CANARY}.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').write_text('')\nclass Canary: pass\ndef run(): pass\n"
    )
    (folder.parent / "outside").mkdir(exist_ok=True)
    (folder.parent / "outside" / "secret").write_text("{}")


def survives(work: Callable[[], Any], folder: Path) -> bool:
    """Return whether `work` was done, after checks that it did nothing but read and write in `folder`.

    It may raise a PosswapError, whose message is not empty, and nothing else; and not take longer than `SECONDS`. Its
    warnings end here: with a surrogate of a hostile name they cannot be sent on to who gathers the tests' output.
    """
    watched = _watched()
    watched.seen.clear()
    watched.folder = Path(os.path.realpath(folder))
    refused: PosswapError | None = None
    try:
        with _bounded(), warnings.catch_warnings(record=True):
            work()
    except PosswapError as error:
        refused = error
    finally:
        watched.folder = None
    assert refused is None or str(refused).strip()
    assert watched.seen == [], watched.seen
    assert not (folder / "ran").exists()
    return refused is None


def fuzz(examples: int, strategy: Any, check: Callable[[Any], Any]) -> None:
    """Call `check` on so many examples of `strategy`: the same ones each time, or new ones with POSSWAP_FUZZ=new."""

    @settings(
        max_examples=examples,
        derandomize=os.environ.get("POSSWAP_FUZZ") != "new",
        database=None,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        phases=(Phase.generate,),  # what hangs would hang at every step to a smaller example
    )
    @given(strategy)
    def each(value: Any) -> None:
        check(value)

    each()
