"""Progress of a whole comparison: unit k of n over all models and metrics, and the remaining time.

The time of a unit is fitted to the finished units: a time per operation, a time per forward, and a factor for each
model, because the same operations are slower with some mechanisms than with others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.utils.printable import printable
from hf_posswap.utils.progress import BarReporter, Reporter

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_QUIET_SECONDS, _SHOWN_SECONDS = 30.0, 0.2


@dataclass(frozen=True)
class UnitCost:
    """The cost of a unit.

    Attributes:
        model: name of the model.
        operations: floating-point operations of its forwards.
        forwards: number of forwards.
        tokens: number of tokens that they read.
    """

    model: str
    operations: float
    forwards: int
    tokens: int


@dataclass
class SpeedModel:
    """A model of the seconds of units, fitted to finished units.

    Example:
        >>> speed = SpeedModel()
        >>> for load in (UnitCost("a", 100.0, 1, 8), UnitCost("a", 50.0, 2, 8)):
        ...     speed.learn(load, 0.01 * load.operations + 2.0 * load.forwards)
        >>> round(speed.seconds([UnitCost("a", 300.0, 1, 8)]), 6)
        5.0
    """

    rows: list[tuple[str, float, float, float]] = field(default_factory=list)

    def learn(self, load: UnitCost, seconds: float) -> None:
        """Add a finished unit to the fit."""
        self.rows.append((load.model, load.operations, float(load.forwards), seconds))

    def seconds(self, loads: list[UnitCost]) -> float:
        """Predict the seconds that `loads` will take; 0 before the first unit is finished."""
        if not self.rows or not loads:
            return 0.0
        features, times = np.array([row[1:3] for row in self.rows]), np.array([row[3] for row in self.rows])
        scale = np.maximum(features.max(axis=0), 1e-9)
        rates = _non_negative(features / scale, times) / scale
        factors = self._factors(features @ rates, times)
        expected = np.array([(load.operations, load.forwards) for load in loads]) @ rates
        return float(sum(time * factors.get(load.model, 1.0) for time, load in zip(expected, loads, strict=True)))

    def _factors(self, expected: np.ndarray, times: np.ndarray) -> dict[str, float]:
        """Return the ratio of measured to expected time of each model."""
        names = np.array([row[0] for row in self.rows])
        return {
            str(name): float(times[names == name].sum() / max(expected[names == name].sum(), 1e-12))
            for name in set(names.tolist())
        }


def _non_negative(features: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the non-negative least-squares rates [2] of `times` [N] on `features` [N, 2]."""
    both = np.linalg.lstsq(features, times, rcond=1e-6)[0]
    if both.min() >= 0:
        return both
    alone = [np.array([column @ times / max(column @ column, 1e-12), 0.0]) for column in features.T]
    candidates = [alone[0], alone[1][::-1]]
    return min(candidates, key=lambda rates: float(((features @ rates - times) ** 2).sum()))


class ProgressEstimator:
    """Shows the progress of all units of a comparison.

    Args:
        reporter: prints the progress.
        share: number of processes that share the units.
    """

    def __init__(self, reporter: Reporter, share: int = 1) -> None:
        self.reporter, self.share, self.speed = reporter, share, SpeedModel()
        self.pending: dict[str, UnitCost] = {}
        self.finished: set[str] = set()
        self.label = ""
        self.started = self.last_shown = time.monotonic()
        self.tokens, self.spent = 0, 0.0
        self._bar: tuple[Progress, TaskID] | None = None
        self._tqdm_bar: Any = None
        self._stack = ExitStack()

    def plan(self, loads: Mapping[str, UnitCost]) -> None:
        """Set the pending units by key; finished ones stay counted."""
        self.pending = {key: load for key, load in loads.items() if key not in self.finished}
        if self._tqdm_bar is not None:
            self._tqdm_bar.total = self.total
            self._tqdm_bar.refresh()

    @property
    def total(self) -> int:
        """Number of finished and pending units of this run, over all processes."""
        return len(self.finished) * self.share + len(self.pending)

    @property
    def left(self) -> float:
        """Estimated seconds until all units are finished."""
        return self.speed.seconds(list(self.pending.values())) / self.share

    def finish(self, key: str, load: UnitCost, seconds: float, loss: float | None = None) -> None:
        """Count a unit that took `seconds`, and show the progress."""
        self.finished.add(key)
        self.pending.pop(key, None)
        self.speed.learn(load, seconds)
        self.tokens, self.spent = self.tokens + load.tokens, self.spent + seconds
        self._show(loss)

    @property
    def done(self) -> int:
        """Number of finished units of this run, over all processes."""
        return min(len(self.finished) * self.share, self.total)

    def status_text(self, loss: float | None) -> str:
        """Return the progress as text."""
        rate = f"{self.tokens / max(self.spent, 1e-9):,.0f} tokens/s"
        more = "" if loss is None else f", loss {loss:.3f}"
        return f"unit {self.done} of {self.total}, {rate}{more}, {_clock(self.left)} left"

    def _show(self, loss: float | None) -> None:
        now = time.monotonic()
        if self._tqdm_bar is not None:
            self._tqdm_bar.total = self.total
            self._tqdm_bar.set_description_str(printable(self.label), refresh=False)
            self._tqdm_bar.set_postfix_str("" if loss is None else f"loss {loss:.3f}", refresh=False)
            self._tqdm_bar.update(self.done - self._tqdm_bar.n)
        elif self._bar is not None and now - self.last_shown >= _SHOWN_SECONDS:
            self.last_shown = now
            progress, bar = self._bar
            spent, left = now - self.started, self.left
            progress.update(
                bar, completed=spent, total=spent + left, description=self.label, status=self.status_text(loss)
            )
        elif self._bar is None and now - self.last_shown >= _QUIET_SECONDS:
            self.last_shown = now
            self.reporter.line(f"{self.label}: {self.status_text(loss)}")

    def __enter__(self) -> ProgressEstimator:
        if isinstance(self.reporter, BarReporter):
            self._tqdm_bar = self._stack.enter_context(self.reporter.bar("measuring", self.total, "unit"))
            return self
        console = self.reporter.console
        if console.is_terminal and not console.is_dumb_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            name = TextColumn("{task.description:<24}", markup=False)
            status = TextColumn("{task.fields[status]}", markup=False)
            progress = Progress(name, BarColumn(bar_width=24), status, console=console, transient=True)
            progress.start()
            self._bar = progress, progress.add_task("", total=None, status="")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._tqdm_bar = None
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


def _clock(seconds: float) -> str:
    """Format seconds as minutes or hours.

    Example:
        >>> _clock(42), _clock(3725)
        ('0:42', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
