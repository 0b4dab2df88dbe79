"""Shared state of the metrics: the subject, the documents, the store, and the progress of the whole comparison.

Progress is unit k of n over all models and metrics, and the remaining time. The time of a unit is fitted to the
finished units: a time per operation, a time per forward, and a factor for each model, because the same operations are
slower with some mechanisms than with others. Before a long run, a short forward gives the first estimate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.comparison.candidates import Subject
from hf_posswap.comparison.documents import EvalDocuments
from hf_posswap.comparison.names import CONTROL, is_control
from hf_posswap.comparison.ranks import Ranks
from hf_posswap.comparison.settings import EvalSettings
from hf_posswap.errors import DataError
from hf_posswap.evaluation.cost import forward_operations
from hf_posswap.evaluation.store import RunStore, Value, unit_key
from hf_posswap.patching.record.training import training_of
from hf_posswap.utils.printable import printable
from hf_posswap.utils.progress import BarReporter, Reporter

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


_QUIET_SECONDS, _SHOWN_SECONDS = 30.0, 0.2
_TIMED_TOKENS, _TIMED_SECONDS = 64, 0.2  # the first forward that is timed, and how long the last one takes at least


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
    """Return the non-negative least-squares rates [2] of `times` [N] on `features` [N, 2].

    Units of one kind do not tell the two rates apart: all their time is then that of the operations, which dominate
    where a run takes long.
    """
    both, _, rank, _ = np.linalg.lstsq(features, times, rcond=1e-6)
    if rank == 2 and both.min() >= 0:
        return both
    if rank < 2:
        return np.array([features[:, 0] @ times / max(features[:, 0] @ features[:, 0], 1e-12), 0.0])
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

    def calibrate(self, subject: Subject, ids: Tensor) -> None:
        """Time a forward of `subject` on the first tokens of `ids` [1, L], as many as give a reliable time.

        Two times, of a short forward and of the first unit, tell the time per operation from that per forward.
        """
        _forward_seconds(subject, ids[:, :_TIMED_TOKENS])  # loads what a first forward needs
        tokens, seconds = min(_TIMED_TOKENS, ids.shape[1]), 0.0
        while (seconds := _forward_seconds(subject, ids[:, :tokens])) < _TIMED_SECONDS and tokens < ids.shape[1]:
            tokens = min(2 * tokens, ids.shape[1])
        self.speed.learn(UnitCost(subject.name, forward_operations(subject.model, tokens), 1, tokens), seconds)

    def finish(self, key: str, load: UnitCost, seconds: float, loss: float | None = None) -> None:
        """Count a unit that took `seconds`, and show the progress."""
        self.finished.add(key)
        self.pending.pop(key, None)
        self.speed.learn(load, seconds)
        self.tokens, self.spent = self.tokens + load.tokens, self.spent + seconds
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

    @property
    def done(self) -> int:
        """Number of finished units of this run, over all processes."""
        return min(len(self.finished) * self.share, self.total)

    def status_text(self, loss: float | None) -> str:
        """Return the progress as text."""
        rate = f"{self.tokens / max(self.spent, 1e-9):,.0f} tokens/s"
        more = "" if loss is None else f", loss {loss:.3f}"
        return f"unit {self.done} of {self.total}, {rate}{more}, {_clock(self.left)} left"

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


def _forward_seconds(subject: Subject, ids: Tensor) -> float:
    """Return the seconds of the logits of every token of `ids` [1, L]."""
    begin = time.perf_counter()
    for logits in subject.scorer.logits(ids, ids.shape[1] - 1):
        float(logits.sum())  # waits for a GPU
    return time.perf_counter() - begin


def _clock(seconds: float) -> str:
    """Format seconds as minutes or hours.

    Example:
        >>> _clock(42), _clock(3725)
        ('0:42', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True)
class Unit:
    """One document, prompt or cell to measure: the smallest piece of work that is stored and assigned to a process.

    Attributes:
        protocol: the metric and its parameters.
        what: the document, length or prompt.
        compute: computes the value.
        reads: tokens of each forward.
        loss: extracts a loss to show from a value; None without a loss.
    """

    protocol: Mapping[str, object]
    what: Mapping[str, object]
    compute: Callable[[], Value]
    reads: Sequence[int]
    loss: Callable[[Any], float] | None = None


@dataclass
class Work:
    """One subject, and everything that it is measured on.

    Attributes:
        subject: the model to measure.
        base: the baseline; None if the subject is the baseline.
        tokenizer: the tokenizer of both.
        documents: the text.
        lengths: the lengths that the subject can run, in ascending order.
        window: the original window, or the longest length if that is less, in tokens.
        metrics: the metrics to measure.
        settings: settings of the evaluation.
        store: the store of finished units.
        ranks: the processes that share the units.
        reporter: shows progress; None: silent.
        raw: raw values by metric for comparisons, filled by the metrics.
        overall: progress of the whole comparison, or None.
        planned: while planning, the missing units by key; None while measuring.
        dropped: metrics that are not measured on any model, and why.
    """

    subject: Subject
    base: Subject | None
    tokenizer: PreTrainedTokenizerBase
    documents: EvalDocuments
    lengths: tuple[int, ...]
    window: int
    metrics: tuple[str, ...]
    settings: EvalSettings
    store: RunStore
    ranks: Ranks = Ranks()
    reporter: Reporter | None = None
    raw: dict[str, Any] = field(default_factory=dict)
    overall: ProgressEstimator | None = None
    planned: dict[str, UnitCost] | None = None
    dropped: dict[str, str] = field(default_factory=dict)

    def values(self, label: str, units: Sequence[Unit], *, alone: bool = False) -> list[Any]:
        """Return the values of units of this subject, in order, from the store or computed now.

        Missing units are distributed over the processes, and each process gets all values.

        Args:
            label: description of the units for the progress display.
            units: the units, the same in every process.
            alone: whether the main process computes all of them while the others wait, as required for timing.

        Raises:
            PosswapError: as the units; all processes raise it.
        """
        names = [self._name(unit) for unit in units]
        if self.planned is not None:
            missing_now = [(name, unit) for name, unit in zip(names, units, strict=True) if not self.store.holds(name)]
            self.planned |= {unit_key(name): self._load(unit) for name, unit in missing_now}
            raise Planned
        stored = zip(*self.ranks.gather([self.store.holds(name) for name in names]), strict=True)
        missing = [number for number, flags in enumerate(stored) if not all(flags)]
        turn = slice(None) if alone and self.ranks.is_main else slice(0) if alone else self._turn
        mine = self.ranks.agree(lambda: self._compute(label, {number: units[number] for number in missing[turn]}))
        for computed in self.ranks.gather(mine):
            for number, value in computed.items():
                self.store.learn(names[number], value)
        return [self.store.value(name, unit.compute) for name, unit in zip(names, units, strict=True)]

    @property
    def _turn(self) -> slice:
        return slice(self.ranks.index, None, self.ranks.count)

    def _name(self, unit: Unit) -> dict[str, object]:
        return {"model": self.subject.identity, "protocol": dict(unit.protocol), "unit": dict(unit.what)}

    def _compute(self, label: str, units: Mapping[int, Unit]) -> dict[int, Value]:
        """Return the values of units by number, and show the progress."""
        values: dict[int, Value] = {}
        for number, unit in units.items():
            name, begin = self._name(unit), time.monotonic()
            values[number] = value = self.store.value(name, unit.compute)
            if self.overall is not None:
                self.overall.label = f"{self.subject.name}: {label}"
                loss = None if unit.loss is None else unit.loss(value)
                self.overall.finish(unit_key(name), self._load(unit), time.monotonic() - begin, loss)
        return values

    def _load(self, unit: Unit) -> UnitCost:
        reads, model = unit.reads, self.subject.model
        operations = sum(forward_operations(model, length) * reads.count(length) for length in set(reads))
        return UnitCost(self.subject.name, operations, len(reads), sum(reads))


def window_reader(subjects: Sequence[Subject], reference: Subject) -> Subject:
    """Return the model that reads sliding windows, whose window is that of the comparison.

    It is the control (called so, or unswapped and trained by the recipe of that name), else the reference or the first
    model if that is unswapped, else the reference.
    """
    unswapped = [subject for subject in (reference, *subjects) if subject.plan is None]
    trained = {id(subject): training_of(subject.model.config) for subject in unswapped}
    controls = {id(subject) for subject in unswapped if getattr(trained[id(subject)], "recipe", None) == CONTROL}
    named = [subject for subject in subjects if is_control(subject.name) or id(subject) in controls]
    return (named or unswapped or [reference])[0]


class Planned(Exception):
    """Stops a metric after it has listed its units."""


def planned_units(work: Work, ask: Callable[[Work], object]) -> dict[str, UnitCost]:
    """Return the missing units of the metric `ask` on `work`, by key, without measuring anything.

    A metric requests all its units at once. A metric that does not apply has none.

    Args:
        work: the work to plan.
        ask: the metric.
    """
    work.planned = {}
    try:
        ask(work)
    except (Planned, DataError):
        pass
    finally:
        missing, work.planned = work.planned, None
    return missing


def document_losses(work: Work, length: int) -> np.ndarray:
    """Return the losses of the first `length` tokens of each document, float32 [N, length - 1]."""
    return losses_by_length(work, [length])[length]


def losses_by_length(work: Work, lengths: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the losses of the first tokens of each document, {L: float32 [N, L - 1]}.

    One forward of the longest length serves all lengths if the subject is prefix-consistent; otherwise each length has
    its own forward.
    """
    return values_and_losses(work, "losses", (), lengths)[1]


def values_and_losses(
    work: Work, label: str, units: Sequence[Unit], lengths: Sequence[int]
) -> tuple[list[Value], dict[int, np.ndarray]]:
    """Return the values of units, and the losses of `losses_by_length`: asked for at once, both are planned.

    Args:
        work: the subject and its documents.
        label: as in `Work.values`.
        units: beside the losses, in order.
        lengths: of the losses; each at most the longest length of the work.
    """
    whole = work.subject.reach.prefix_consistent
    runs = {length: max(work.lengths) if whole else length for length in lengths}
    cached = work.raw.setdefault("losses", {})
    missing = sorted(set(runs.values()) - set(cached))
    count = len(work.documents.tokens)
    units_to_read = [*(_loss_unit(work, number, run) for run in missing for number in range(count)), *units]
    values = iter(work.values(label, units_to_read) if units_to_read else [])
    for run in missing:
        cached[run] = np.stack([next(values) for _ in range(count)])
    return list(values), {length: cached[run][:, : length - 1] for length, run in runs.items()}


def _loss_unit(work: Work, number: int, length: int) -> Unit:
    ids = torch.from_numpy(work.documents.tokens[number, None, :length].astype(np.int64))
    unit_id = {"document": work.documents.digests[number], "length": length}
    return Unit({"metric": "losses"}, unit_id, lambda: work.subject.scorer.nll(ids)[0].numpy(), (length,), np.mean)


def key_of(work: Work) -> str:
    """Return the identity of the base for the keys of units that also depend on it."""
    return unit_key((work.base or work.subject).identity)
