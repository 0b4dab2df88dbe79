"""The progress of a whole comparison: every unit is counted once, and the time left is that of the units to come."""

from __future__ import annotations

import io
import random
import re
from typing import Any

import pytest
from rich.console import Console

from hf_posswap.comparison import Candidate, EvalSettings, compare, work
from hf_posswap.comparison.work import ProgressEstimator, SpeedModel, UnitCost
from hf_posswap.training import byte_tokenizer
from hf_posswap.utils.progress import Reporter
from tests.comparison.test_names import TEXTS, gpt2

SAID = re.compile(r"unit (\d+) of (\d+), [\d,]+ tokens/s(?:, loss [\d.]+)?, [\d:]+ left")


def quiet() -> Reporter:
    return Reporter(Console(file=io.StringIO(), width=200))


def real_seconds(load: UnitCost) -> float:
    """Return what a unit takes on a machine where a forward costs a time of its own, and one mechanism is slow."""
    return (2e-9 * load.operations + 0.003 * load.forwards) * (3.0 if load.model == "slow" else 1.0)


def test_the_time_left_is_that_of_the_units_to_come() -> None:
    random.seed(0)
    kinds = [(1e6, 1), (64e6, 1), (9e6, 7), (512e6, 1)]
    loads = {
        f"{model} {kind} {number}": UnitCost(model, *kinds[kind], 8)
        for model in ("fast", "slow")
        for kind in range(len(kinds))
        for number in range(10)
    }
    order = random.sample(sorted(loads), len(loads))
    progress = ProgressEstimator(quiet())
    progress.plan(loads)
    naive = []
    for done, key in enumerate(order, 1):
        progress.finish(key, loads[key], real_seconds(loads[key]))
        if done >= 20 and done < len(order):
            truth = sum(real_seconds(loads[left]) for left in order[done:])
            assert progress.left == pytest.approx(truth, rel=0.1)
            spent = sum(real_seconds(loads[seen]) for seen in order[:done])
            naive.append(abs(spent / done * (len(order) - done) / truth - 1))
    assert max(naive) > 0.2  # counting units alone would have been wrong
    assert progress.left == 0.0


def test_units_that_are_dropped_leave_the_plan_and_those_done_stay_counted() -> None:
    loads = {str(number): UnitCost("a", 1e6, 1, 8) for number in range(10)}
    progress = ProgressEstimator(quiet())
    progress.plan(loads)
    progress.finish("0", loads["0"], 1.0)
    assert progress.status_text(None) == "unit 1 of 10, 8 tokens/s, 0:09 left"
    progress.plan({key: load for key, load in loads.items() if int(key) < 5})
    assert progress.status_text(2.5) == "unit 1 of 5, 8 tokens/s, loss 2.500, 0:04 left"
    shared = ProgressEstimator(quiet(), share=2)
    shared.plan(loads)
    assert shared.total == 10


def test_no_rate_is_ever_below_zero() -> None:
    speed = SpeedModel()
    for operations, forwards, seconds in ((1e6, 9, 0.001), (9e6, 1, 1.0), (5e6, 5, 0.2)):
        speed.learn(UnitCost("a", operations, forwards, 8), seconds)
    assert speed.seconds([UnitCost("a", 1e6, 100, 8)]) >= 0
    assert SpeedModel().seconds([UnitCost("a", 1.0, 1, 1)]) == 0.0


@pytest.mark.parametrize("metrics", [None, ("ppl_prefix", "nll_pos", "ppl_compat", "ruler_lite", "cost")])
def test_every_unit_of_a_comparison_is_counted_once(monkeypatch: pytest.MonkeyPatch, metrics: Any) -> None:
    monkeypatch.setattr(work, "_QUIET_SECONDS", 0.0)
    reporter = quiet()
    settings = EvalSettings(lengths=(24, 64), trials=1, documents=4, metrics=metrics, stride=8)
    candidates = [Candidate(gpt2(), name="base"), Candidate(gpt2(), "rope")]
    run = compare(candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings, reporter=reporter)
    shown = [(int(k), int(n)) for k, n in SAID.findall(reporter.console.file.getvalue())]  # type: ignore[attr-defined]
    assert shown == [(number, run.computed) for number in range(1, run.computed + 1)]


def test_a_run_that_goes_on_counts_what_is_left(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_QUIET_SECONDS", 0.0)
    arguments: dict[str, Any] = {"documents": TEXTS, "tokenizer": byte_tokenizer(), "out": tmp_path, "pictures": False}
    compare([Candidate(gpt2(), name="base")], settings=EvalSettings((24, 32), ("ppl_prefix",)), **arguments)
    reporter = quiet()
    more = EvalSettings((24, 32), ("ppl_prefix", "offset_probe"))
    run = compare([Candidate(gpt2(), name="base")], settings=more, reporter=reporter, **arguments)
    shown = SAID.findall(reporter.console.file.getvalue())  # type: ignore[attr-defined]
    assert len(shown) == run.computed == len(TEXTS)
    assert shown[-1] == (str(len(TEXTS)),) * 2


def test_a_terminal_shows_one_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160, _environ={"TERM": "xterm"})
    settings = EvalSettings(lengths=(32,), metrics=("ppl_prefix",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "_SHOWN_SECONDS", 0.0)
        compare(
            [Candidate(gpt2(), name="base")], documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings,
            reporter=Reporter(console),
        )  # fmt: skip
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "base: losses" in text
    assert f"unit {len(TEXTS)} of {len(TEXTS)}" in text
