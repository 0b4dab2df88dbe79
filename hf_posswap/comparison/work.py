"""Shared state of the metrics: the subject, the documents, the store, and the progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.comparison.candidates import Subject
from hf_posswap.comparison.documents import EvalDocuments
from hf_posswap.comparison.overall import ProgressEstimator, UnitCost
from hf_posswap.comparison.ranks import Ranks
from hf_posswap.comparison.settings import EvalSettings
from hf_posswap.errors import DataError
from hf_posswap.evaluation.cost import forward_operations
from hf_posswap.evaluation.store import RunStore, Value, unit_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_posswap.utils.progress import Reporter


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

    protocol: Mapping[str, Any]
    what: Mapping[str, Any]
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
        window: the original window, in tokens.
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

    def _name(self, unit: Unit) -> dict[str, Any]:
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


class Planned(Exception):
    """Stops a metric after it has listed its units."""


def planned_units(work: Work, ask: Callable[[Work], Any]) -> dict[str, UnitCost]:
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
    longest = max(work.lengths)
    runs = {length: longest if work.subject.reach.prefix_consistent else length for length in lengths}
    cached = work.raw.setdefault("losses", {})
    missing = sorted(set(runs.values()) - set(cached))
    if missing:
        units = [_loss_unit(work, number, run) for run in missing for number in range(len(work.documents.tokens))]
        values = iter(work.values("losses", units))
        for run in missing:
            cached[run] = np.stack([next(values) for _ in work.documents.tokens])
    return {length: cached[run][:, : length - 1] for length, run in runs.items()}


def _loss_unit(work: Work, number: int, length: int) -> Unit:
    import torch

    ids = torch.from_numpy(work.documents.tokens[number, None, :length].astype(np.int64))
    unit_id = {"document": work.documents.digests[number], "length": length}
    return Unit({"metric": "losses"}, unit_id, lambda: work.subject.scorer.nll(ids)[0].numpy(), (length,), np.mean)


def key_of(work: Work) -> str:
    """Return the identity of the base for the keys of units that also depend on it."""
    return unit_key((work.base or work.subject).identity)
