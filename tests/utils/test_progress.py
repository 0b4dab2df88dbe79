"""The bar and the time that is left go by what steps cost, not by their number."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import transformers
from rich.console import Console

from hf_posswap.errors import OptionError
from hf_posswap.utils import progress
from hf_posswap.utils.progress import BarReporter, Reporter, reporter_for, shows_progress

ROOT = Path(__file__).resolve().parents[2]


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


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        """Return that it is one."""
        return True


@pytest.fixture(autouse=True)
def _bars_on() -> Iterator[None]:
    """Show bars, whatever a command that ran in this process before has set."""
    was = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.enable_progress_bar()
    yield
    if not was:
        transformers.utils.logging.disable_progress_bar()


def test_bars_are_for_terminals_alone_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not shows_progress(None)
    assert shows_progress(True)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shows_progress(None)
    assert not shows_progress(False)
    monkeypatch.setenv("RANK", "1")
    assert not shows_progress(None)
    for given in (1, "yes"):
        with pytest.raises(OptionError, match="progress is True, False or None, got"):
            shows_progress(given)  # type: ignore[arg-type]


def test_what_turns_bars_off_in_transformers_and_the_hub_turns_them_off_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    transformers.utils.logging.disable_progress_bar()
    try:
        assert not shows_progress(None)
        assert shows_progress(True)
    finally:
        transformers.utils.logging.enable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    try:
        assert not shows_progress(None)
    finally:
        huggingface_hub.utils.enable_progress_bars()
    assert shows_progress(None)


def test_a_reporter_that_is_given_shows_instead_of_bars() -> None:
    given, _ = quiet()
    assert reporter_for(None, given) is reporter_for(True, given) is given
    assert reporter_for(False) is None
    assert isinstance(reporter_for(True), BarReporter)


def test_a_bar_counts_steps_after_those_done_before(capsys: pytest.CaptureFixture[str]) -> None:
    with BarReporter().task("a\x1b[31m", 10) as task:
        task.skip(4)
        task.advance(8, 2.0, more="lr 1")
        assert (task.tqdm_bar.n, task.tqdm_bar.initial, task.done) == (5, 4, 5)  # type: ignore[attr-defined]
        assert task.tqdm_bar.postfix == "loss 2.000  lr 1"  # type: ignore[attr-defined]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "5/10" in shown.err
    assert "\x1b[31m" not in shown.err


CALL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import hf_posswap
from hf_posswap.training import byte_tokenizer

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=16))
texts = ["a text of some letters", "another text of letters"]
how = {"tokenizer": byte_tokenizer(), "text": texts, "metrics": "ppl_prefix"}
hf_posswap.evaluate(model, "rope", lengths=[8, 16], **how)
hf_posswap.fit_bias(model, "alibi", torch.arange(32).view(2, 16))
"""


@pytest.mark.slow
def test_a_call_shows_bars_on_a_real_terminal_and_nothing_in_a_file() -> None:
    command = [sys.executable, "-c", CALL]
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    piped = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "%|" not in piped.stderr + piped.stdout
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    while True:
        try:
            block = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        shown += block
    os.close(master)
    assert process.wait() == 0
    text = shown.decode()
    assert re.search(r"GPT2LMHeadModel\+rope: losses: 100%\|.*\| 4/4 ", text), text  # two models on two texts
    assert re.search(r"fit_bias: layers: 100%\|.*\| 1/1 ", text), text
