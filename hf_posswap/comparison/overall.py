"""How far a whole comparison is: unit k of n over all models and metrics, and the time that is left.

The time of a unit is fitted to those that are done: so much an operation and so much a forward, and a factor for each
model, because the same operations take one mechanism longer than another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from hf_posswap.utils.progress import Reporter

_QUIET_SECONDS, _SHOWN_SECONDS = 30.0, 0.2


@dataclass(frozen=True)
class Load:
    """What a unit takes.

    Attributes:
        model: that reads.
        operations: of its forwards, in floating-point operations.
        forwards: how many.
        tokens: that they read.
    """

    model: str
    operations: float
    forwards: int
    tokens: int


@dataclass
class Speed:
    """Seconds of units, fitted to those that are done.

    Example:
        >>> speed = Speed()
        >>> for load in (Load("a", 100.0, 1, 8), Load("a", 50.0, 2, 8)):
        ...     speed.learn(load, 0.01 * load.operations + 2.0 * load.forwards)
        >>> round(speed.seconds([Load("a", 300.0, 1, 8)]), 6)
        5.0
    """

    rows: list[tuple[str, float, float, float]] = field(default_factory=list)

    def learn(self, load: Load, seconds: float) -> None:
        """Take a unit that is done into account."""
        self.rows.append((load.model, load.operations, float(load.forwards), seconds))

    def seconds(self, loads: list[Load]) -> float:
        """Return the seconds that `loads` will take; 0 before any unit is done."""
        if not self.rows or not loads:
            return 0.0
        features, times = np.array([row[1:3] for row in self.rows]), np.array([row[3] for row in self.rows])
        scale = np.maximum(features.max(axis=0), 1e-9)
        rates = _non_negative(features / scale, times) / scale
        factors = self._factors(features @ rates, times)
        asked = np.array([(load.operations, load.forwards) for load in loads]) @ rates
        return float(sum(one * factors.get(load.model, 1.0) for one, load in zip(asked, loads, strict=True)))

    def _factors(self, expected: np.ndarray, times: np.ndarray) -> dict[str, float]:
        """Return how much longer than expected each model takes."""
        names = np.array([row[0] for row in self.rows])
        return {
            str(name): float(times[names == name].sum() / max(expected[names == name].sum(), 1e-12))
            for name in set(names.tolist())
        }


def _non_negative(features: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the rates [2], none below zero, whose sums over `features` [N, 2] are nearest to `times` [N]."""
    both = np.linalg.lstsq(features, times, rcond=1e-6)[0]
    if both.min() >= 0:
        return both
    alone = [np.array([column @ times / max(column @ column, 1e-12), 0.0]) for column in features.T]
    candidates = [alone[0], alone[1][::-1]]
    return min(candidates, key=lambda rates: float(((features @ rates - times) ** 2).sum()))


class Overall:
    """Shows the progress of all units of a comparison.

    Args:
        reporter: where to.
        share: processes that measure together: each does that part of the units.
    """

    def __init__(self, reporter: Reporter, share: int = 1) -> None:
        self.reporter, self.share, self.speed = reporter, share, Speed()
        self.pending: dict[str, Load] = {}
        self.finished: set[str] = set()
        self.label = ""
        self.started = self.said = time.monotonic()
        self.tokens, self.spent = 0, 0.0
        self._bar: tuple[Progress, TaskID] | None = None

    def plan(self, loads: Mapping[str, Load]) -> None:
        """Set what is to be done, by the key of the unit; what is done already stays counted."""
        self.pending = {key: load for key, load in loads.items() if key not in self.finished}

    @property
    def total(self) -> int:
        """Units of this run, done and to be done, over all processes."""
        return len(self.finished) * self.share + len(self.pending)

    @property
    def left(self) -> float:
        """Seconds until all is done."""
        return self.speed.seconds(list(self.pending.values())) / self.share

    def finish(self, key: str, load: Load, seconds: float, loss: float | None = None) -> None:
        """Count a unit that took `seconds`, and show where the comparison stands."""
        self.finished.add(key)
        self.pending.pop(key, None)
        self.speed.learn(load, seconds)
        self.tokens, self.spent = self.tokens + load.tokens, self.spent + seconds
        self._show(loss)

    def said_now(self, loss: float | None) -> str:
        """Return where the comparison stands, in words."""
        rate = f"{self.tokens / max(self.spent, 1e-9):,.0f} tokens/s"
        more = "" if loss is None else f", loss {loss:.3f}"
        done = min(len(self.finished) * self.share, self.total)
        return f"unit {done} of {self.total}, {rate}{more}, {_clock(self.left)} left"

    def _show(self, loss: float | None) -> None:
        now = time.monotonic()
        if self._bar is not None and now - self.said >= _SHOWN_SECONDS:
            self.said = now
            progress, bar = self._bar
            spent, left = now - self.started, self.left
            progress.update(bar, completed=spent, total=spent + left, description=self.label, said=self.said_now(loss))
        elif self._bar is None and now - self.said >= _QUIET_SECONDS:
            self.said = now
            self.reporter.line(f"{self.label}: {self.said_now(loss)}")

    def __enter__(self) -> Overall:
        console = self.reporter.console
        if console.is_terminal and not console.is_dumb_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            name = TextColumn("{task.description:<24}", markup=False)
            said = TextColumn("{task.fields[said]}", markup=False)
            progress = Progress(name, BarColumn(bar_width=24), said, console=console, transient=True)
            progress.start()
            self._bar = progress, progress.add_task("", total=None, said="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


def _clock(seconds: float) -> str:
    """Return a time as a clock shows it.

    Example:
        >>> _clock(42), _clock(3725)
        ('0:42', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
