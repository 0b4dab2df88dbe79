"""What a person sees while it runs: bars on a terminal that can move its cursor, a line every half minute elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hf_posswap.utils.printable import printable, printable_lines
from hf_posswap.utils.threads import quiet_logger, shared

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
