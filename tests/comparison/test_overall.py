"""The progress of a whole comparison: every unit is counted once, and the time left is that of the units to come."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from hf_posswap.comparison import Candidate, EvalSettings, compare, measuring, work
from hf_posswap.comparison.candidates import make_subject
from hf_posswap.comparison.work import ProgressEstimator, SpeedModel, UnitCost
from hf_posswap.evaluation.cost import forward_operations
from hf_posswap.evaluation.store import RunStore
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


def test_the_time_left_is_known_after_the_first_unit() -> None:
    """The first unit is long, and most of those to come are short: their time is not that of a forward."""
    loads = {"first": UnitCost("a", 2e12, 1, 4096)}
    loads |= {f"short {number}": UnitCost("a", 3e11, 1, 1024) for number in range(20)}
    loads |= {f"both {number}": UnitCost("a", 4e12, 2, 8192) for number in range(4)}
    progress = ProgressEstimator(quiet())
    progress.plan(loads)

    def truth(load: UnitCost) -> float:
        return 1.1e-11 * load.operations + 0.04 * load.forwards

    progress.speed.learn(UnitCost("a", 2e10, 1, 64), 1.2 * truth(UnitCost("a", 2e10, 1, 64)))  # as calibrated
    total = sum(map(truth, loads.values()))
    assert progress.left == pytest.approx(total, rel=0.5)
    progress.finish("first", loads["first"], truth(loads["first"]))
    assert progress.left == pytest.approx(total - truth(loads["first"]), rel=0.05)
    alone = ProgressEstimator(quiet())
    alone.plan(loads)
    alone.finish("first", loads["first"], truth(loads["first"]))
    assert alone.left == pytest.approx(total - truth(loads["first"]), rel=0.2)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_run_of_hours_says_so_before_it_starts_and_how_it_takes_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_kept: bool
) -> None:
    """Hours, as if each forward took half an hour."""
    monkeypatch.setattr(measuring, "_LONG_OPERATIONS", 0.0)
    monkeypatch.setattr(work, "_forward_seconds", lambda subject, ids: 1800.0)
    reporter = quiet()
    settings = EvalSettings(lengths=(32,), metrics=("nll_pos", "ppl_prefix"))
    arguments: dict[str, Any] = {"out": tmp_path, "pictures": False} if is_kept else {}
    candidates = [Candidate(gpt2(), name="base"), Candidate(gpt2(), "rope")]
    run = compare(
        candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings, reporter=reporter, **arguments
    )
    lines = reporter.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    said = re.fullmatch(
        r"(\d+) units of 2 models take about ([\d.]+) hours here: nll_pos and ppl_prefix \2 hours\.", lines[0]
    )
    assert said is not None
    assert int(said[1]) == run.computed
    assert float(said[2]) == pytest.approx(run.computed / 2, rel=0.1)  # one of the two has no table
    assert lines[1] == "To take less, give shorter lengths."
    kept = "Nothing is kept if it is stopped: give an output folder, from which the same call resumes."
    assert (kept in lines) is not is_kept


def test_the_ways_to_take_less_come_with_their_time() -> None:
    documents, settings = SimpleNamespace(tokens=np.zeros((48, 8))), EvalSettings(trials=10)
    one: Any = SimpleNamespace(
        settings=settings, documents=documents, metrics=settings.metrics_for(True), store=RunStore(None)
    )
    seconds = {"ppl_prefix": 3600.0, "passkey": 36000.0, "sliding window": 400.0}
    _, less, _ = measuring.forecast(seconds, one, 1000, 2)
    # 40,000 s, less 8 tenths of the prompts, or without them; fewer documents would save no tenth
    assert less == (
        "To take less, give trials 2 instead of 10 (about 3.1 hours), or metrics ppl_prefix alone (about 67 minutes), "
        "or shorter lengths."
    )
    _, less, _ = measuring.forecast({"sliding window": 7200.0, "ppl_prefix": 3600.0}, one, 1000, 2)
    assert less == "To take less, give documents 8 instead of 48 (about 30 minutes), or shorter lengths."
    (line,) = measuring.forecast({"ppl_prefix": 3000.0}, one, 96, 1)
    assert line == "96 units of 1 model take about 50 minutes here: ppl_prefix 50 minutes."
    assert measuring.forecast({"ppl_prefix": 30.0}, one, 96, 1) == []


def test_a_short_run_is_not_timed_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_forward_seconds", lambda subject, ids: pytest.fail("a forward was timed"))
    settings = EvalSettings(lengths=(32,), metrics=("ppl_prefix",))
    compare([gpt2()], documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings, reporter=quiet())


def test_the_speed_is_that_of_a_forward_that_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards get longer until one takes 0.2 s; the units to come are estimated from it."""
    timed: list[int] = []

    def seconds(subject: Any, ids: Any) -> float:
        timed.append(ids.shape[1])
        return ids.shape[1] / 1280

    monkeypatch.setattr(work, "_forward_seconds", seconds)
    progress, subject = ProgressEstimator(quiet()), make_subject("a", gpt2(), 1024)
    progress.calibrate(subject, torch.zeros(1, 1024, dtype=torch.long))
    assert timed == [64, 64, 128, 256]
    operations = forward_operations(subject.model, 256)
    assert progress.speed.seconds([UnitCost("a", 10 * operations, 1, 8)]) == pytest.approx(2.0)


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
