"""Offline, quiet, seeded, strict about deprecations; and loud about real checkpoints that are not there."""

from __future__ import annotations

import os

# Before anything imports transformers or torch: both read their environment once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import collections
import functools
import gc
import logging
import random
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
import torch.utils.collect_env

CHECKPOINTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "checkpoints"
NO_CHECKPOINTS = "real checkpoints not beside the project"
ANNOUNCED = (
    NO_CHECKPOINTS,
    "the page is not tested in a browser",
    "the harness is not tested",
    "run .ci/serving",
    "DeepSpeed is not installed",
    "pip reaches no index that has other releases of transformers",
)
"""Reasons to skip that are said once more at the end, in a line that is seen."""

SLOW_EXAMPLES = (
    "hf_posswap.training.adapting.run_recipe",
    "hf_posswap.comparison.attention.compare_attention",
    "hf_posswap.testing.selfcheck.run.selfcheck",
)
"""Examples in docstrings that are marked slow."""

MANY = 4
"""A run has a part of the cases of a test of so many and more, at least one; the others are slow and rotated."""
WHOLE = ("docs",)
"""Folders whose tests are run whole, as are those in no folder: what they hold to the rules may change anywhere."""
PRECISION = "ACCELERATE_MIXED_PRECISION"
PART = "POSSWAP_PART"
"""The environment variable that says which eighth of those cases, 0 to 7, or all; without it the first."""

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Programs that tests start in processes of their own, and a package that they build: no doctests to be looked for by
# importing them.
collect_ignore_glob = ["*/*_child.py", "checkpoints/loopback_client.py", "toys/package/*"]

# The same examples in every run, and no deadline: a busy machine is no failure.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("project")


class _DeprecationLog(logging.Handler):
    """Keeps what transformers logs about deprecations: most of them are log lines and not Python warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "deprecated" in message.lower():
            self.messages.append(message)


@pytest.fixture(autouse=True)
def _no_deprecated_calls() -> Iterator[None]:
    handler = _DeprecationLog()
    once = getattr(logging.Logger, "warning_once", None)  # transformers adds it when it is imported
    if once is not None:
        once.cache_clear()  # what was said before is said again
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.messages, f"transformers says that this test calls something deprecated: {handler.messages}"


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Give the process back the log levels and the precision of accelerate that trainers of a test set for good."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub", "datasets")]
    levels, precision = [logger.level for logger in loggers], os.environ.get(PRECISION)
    known = _precision_in_force()
    yield
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level and level != logging.NOTSET:  # at first they have none
            logger.setLevel(level)
    if precision is None:
        os.environ.pop(PRECISION, None)
    else:
        os.environ[PRECISION] = precision
    if _precision_in_force() not in (None, "no", known):
        sys.modules["accelerate.state"].AcceleratorState._reset_state()


def _precision_in_force() -> str | None:
    state = sys.modules.get("accelerate.state")
    return None if state is None else state.AcceleratorState._shared_state.get("_mixed_precision")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():  # where there is none, torch.manual_seed keeps a traceback of each call for later
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session", autouse=True)
def _described_once() -> Iterator[None]:
    """Have torch describe this machine once: the harness asks in each run, and it starts pip and ten other programs."""
    described = functools.cache(torch.utils.collect_env.get_pretty_env_info)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.collect_env.get_pretty_env_info", described)
        yield


@pytest.fixture(scope="session")
def shared_checkpoints() -> Path:
    """Return the folder of genuinely trained checkpoints beside the project; skip, loudly, where there is none."""
    if not CHECKPOINTS.is_dir():
        pytest.skip(NO_CHECKPOINTS)
    return CHECKPOINTS


@pytest.fixture(scope="session")
def stock_compiles() -> None:
    """Skip where this torch does not take a stock class of this transformers as one graph, as 2.6 does not."""
    from tests.training.tiny_models import tiny

    model = tiny("gpt2")
    try:
        torch.compile(lambda ids: model(ids).logits, fullgraph=True, backend="eager")(torch.arange(4)[None])
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"torch {torch.__version__} does not compile the stock class: {str(error).splitlines()[0]}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="Run the K-th of N shares of the tests, K from 1 to N.")


def _share_of(asked: str | None) -> tuple[int, int]:
    """Return K - 1 and N of "K/N"; without it everything is the one share."""
    first, slash, count = (asked or "1/1").partition("/")
    if not (slash and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise pytest.UsageError(f"--share expects K/N with K from 1 to N, got {asked!r}.")
    return int(first) - 1, int(count)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # marks before -m selects, shares of what it selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    share, shares = _share_of(config.getoption("--share"))
    _mark_other_parts([item for item in items if isinstance(item, pytest.Function)])
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "shared_checkpoints" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)
        if item.name in SLOW_EXAMPLES:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    yield
    selected = [item for item in items if zlib.crc32(item.nodeid.encode()) % shares == share]
    # Of few tests none may fall in a share: it has one of them then, so that an empty run is always an error.
    items[:] = selected or items[share % max(len(items), 1) :][:1]


def _mark_other_parts(items: list[pytest.Function]) -> None:
    """Mark the cases of large tests that are not of this run's part: all but every eighth in the order of a hash."""
    part = os.environ.get(PART, "0")
    if part == "all":
        return
    if part not in [*"01234567"]:
        raise pytest.UsageError(f"{PART} expects 0 to 7, or all, got {part!r}.")
    left_out = [{mark.name for mark in item.iter_markers()} & {"slow", "exhaustive"} for item in items]
    daily = [item for item, marks in zip(items, left_out, strict=True) if not marks and _is_divided(item.path)]
    cases = collections.defaultdict(list)
    for item in daily:
        cases[item.nodeid.partition("[")[0]].append(item)
    for items_of_test in cases.values():
        ordered = sorted(items_of_test, key=lambda item: zlib.crc32(item.nodeid.encode()))
        parts = min(8, len(ordered))
        for number, item in enumerate(ordered if len(ordered) >= MANY else ()):
            if number % parts != int(part) % parts:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.rotated)


@functools.cache
def _is_divided(path: Path) -> bool:
    tests = Path(__file__).parent
    return path.is_relative_to(tests) and path.parent != tests and path.relative_to(tests).parts[0] not in WHOLE


def pytest_collection() -> None:
    gc.disable()  # until it ends: what is collected stays


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Take what is there out of all later searches for garbage: after each file, too, whose imports and caches stay.

    Libraries and tests are some millions of objects, and each training asks for three such searches: a sixth of the
    time of all tests went there.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = [str(report.longrepr) for report in terminalreporter.getreports("skipped")]
    for announced in ANNOUNCED:
        skipped = sum(announced in reason for reason in reasons)
        if skipped:
            terminalreporter.write_line(f"{skipped} tests skipped: {announced}", yellow=True, bold=True)
    faults: dict[str, list[int]] = {}
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for kind, injected, survived in (value for name, value in report.user_properties if name == "faults"):
            counts = faults.setdefault(kind, [0, 0])
            counts[:] = counts[0] + injected, counts[1] + survived
    if faults:
        said = ", ".join(f"{kind} {survived} of {injected}" for kind, (injected, survived) in sorted(faults.items()))
        terminalreporter.write_line(f"faults survived of those injected: {said}")
