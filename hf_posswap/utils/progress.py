"""What a person sees while it runs: bars on a terminal that can move its cursor, a line every half minute elsewhere.

`Reporter` serves the command line; `BarReporter` serves Python callers, in a notebook too, with the bars of tqdm.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hf_posswap.errors import OptionError
from hf_posswap.utils.printable import printable, printable_lines
from hf_posswap.utils.threads import quiet_logger, shared

if TYPE_CHECKING:
    from tqdm import tqdm

_QUIET_SECONDS = 30.0


class Reporter:
    """Writes lines and bars to one console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str) -> None:
        """Write a text as it is, but for what could steer the terminal."""
        self.console.print(printable_lines(text), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def task(self, label: str, total: int, work: float | None = None) -> Iterator[Task]:
        """Show the progress of `total` steps called `label` until the block ends.

        Args:
            label: what the steps are.
            total: how many there are.
            work: cost of all steps, in the unit of `cost` in `Task.advance`; the bar and the remaining time follow it.
                None: all steps cost the same.
        """
        label, work = printable(label), float(total) if work is None else work
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            yield Task(label, total, work, self)
            return
        columns = (
            TextColumn("{task.description:<24}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", markup=False),
            TextColumn("{task.fields[rate]:>14}{task.fields[loss]}", markup=False),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            bar = progress.add_task(label, total=work, count=f"0/{total}", rate="", loss="")
            yield Task(label, total, work, self, progress, bar)


class Task:
    """Steps that are being done; made by `Reporter.task`."""

    def __init__(
        self,
        label: str,
        total: int,
        work: float,
        reporter: Reporter,
        progress: Progress | None = None,
        bar: TaskID | None = None,
    ) -> None:
        self.label, self.total, self.work, self.reporter = label, total, work, reporter
        self.progress, self.bar = progress, bar
        self.done = self.tokens = 0
        self._spent = self._skipped = 0.0
        self.started = self.said = time.monotonic()

    def skip(self, done: int) -> None:
        """Count `done` steps, each of which costs the same, as done before this run: they have no part in the rate."""
        self.done = done
        self._skipped = self.work * done / max(self.total, 1)
        if self.progress is not None and self.bar is not None:
            shown = {"count": f"{done}/{self.total}", "rate": "", "loss": ""}
            self.progress.reset(self.bar, completed=self._skipped, **shown)  # type: ignore[arg-type]

    def advance(self, tokens: int, loss: float | None = None, cost: float = 1.0, more: str = "") -> None:
        """Count one step of `tokens` tokens, with its loss and cost; show `more`."""
        self.done, self.tokens, self._spent = self.done + 1, self.tokens + tokens, self._spent + cost
        now = time.monotonic()
        rate = f"{self.tokens / max(now - self.started, 1e-9):,.0f} tokens/s"
        text = ("" if loss is None else f"  loss {loss:.3f}") + (more and f"  {more}")
        if self.progress is not None and self.bar is not None:
            completed, count = self._skipped + self._spent, f"{self.done}/{self.total}"
            self.progress.update(self.bar, completed=completed, count=count, rate=rate, loss=text)
        elif now - self.said >= _QUIET_SECONDS:
            self.said = now
            left = (now - self.started) / self._spent * max(self.work - self._skipped - self._spent, 0.0)
            self.reporter.line(
                f"{self.label}: {self.done}/{self.total}, {rate}{text and ',' + text}, {left:.0f} s left"
            )


class BarReporter(Reporter):
    """Shows bars of tqdm on stderr, or as widgets in a notebook, and lines above them."""

    def __init__(self) -> None:
        super().__init__(Console(stderr=True))

    def line(self, text: str) -> None:
        from tqdm.auto import tqdm

        tqdm.write(printable_lines(text), file=sys.stderr)

    @contextmanager
    def task(self, label: str, total: int, work: float | None = None) -> Iterator[Task]:
        with self.bar(label, total) as bar:
            yield _BarTask(printable(label), total, self, bar)

    @contextmanager
    def bar(self, label: str, total: int, unit: str = "step") -> Iterator[object]:
        """Show a bar of tqdm called `label`, over `total` units, until the block ends."""
        from tqdm.auto import tqdm

        with tqdm(total=total, desc=printable(label), unit=unit, dynamic_ncols=True) as bar:
            yield bar


class _BarTask(Task):
    """Steps shown by a bar of tqdm."""

    def __init__(self, label: str, total: int, reporter: Reporter, tqdm_bar: tqdm[object]) -> None:
        super().__init__(label, total, float(total), reporter)
        self.tqdm_bar = tqdm_bar

    def skip(self, done: int) -> None:
        super().skip(done)
        self.tqdm_bar.initial = self.tqdm_bar.n = done
        self.tqdm_bar.refresh()

    def advance(self, tokens: int, loss: float | None = None, cost: float = 1.0, more: str = "") -> None:
        self.done, self.tokens = self.done + 1, self.tokens + tokens
        loss_text = "" if loss is None else f"loss {loss:.3f}"
        self.tqdm_bar.set_postfix_str(printable("  ".join(filter(None, (loss_text, more)))), refresh=False)
        self.tqdm_bar.update(1)


def shows_progress(progress: bool | None) -> bool:
    """Return whether a call with the argument `progress` shows bars.

    Args:
        progress: True or False is obeyed. None: bars are shown in a notebook and on a terminal, by the main process of
            a launch, unless HF_HUB_DISABLE_PROGRESS_BARS or `disable_progress_bar` of transformers turns them off.

    Raises:
        OptionError: another value.

    Example:
        >>> shows_progress(True), shows_progress(False)
        (True, False)
    """
    if progress is not None:
        if not isinstance(progress, bool):
            raise OptionError(f"progress is True, False or None, got {progress!r}.")
        return progress
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    if are_progress_bars_disabled() or not logging.is_progress_bar_enabled():
        return False
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return os.environ.get("RANK", "0") == "0" and (is_terminal or _in_notebook())


def reporter_for(progress: bool | None, reporter: Reporter | None = None) -> Reporter | None:
    """Return what shows the progress of a call: `reporter`, else bars if `shows_progress(progress)`, else None."""
    shows_bars = shows_progress(progress)
    return reporter if reporter is not None else BarReporter() if shows_bars else None


@contextmanager
def counted(reporter: Reporter | None, label: str, total: int) -> Iterator[Callable[[float | None], None]]:
    """Show `total` steps called `label` by `reporter`, and give a function that counts one, with its loss or None.

    Args:
        reporter: None shows nothing.
        label: what the steps are.
        total: how many there are.
    """
    if reporter is None:
        yield lambda loss: None
        return
    with reporter.task(label, total) as task:
        yield lambda loss: task.advance(0, loss)


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own bars and notices out of one's own, and put both back."""
    from transformers.utils import logging

    def hide_bars() -> Callable[[], None]:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        return logging.enable_progress_bar if shown else lambda: None

    with quiet_logger("transformers", logging.ERROR), shared("transformers' progress bars", hide_bars):
        yield
