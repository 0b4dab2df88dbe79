"""The benchmarks at tiny sizes: all ways agree, and the harness says so where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from recipes.bench import harness, roof, run
from recipes.bench.harness import Case, measure, peak_mib, table


def bench(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(run.main)
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", run.NAMES)
def test_all_ways_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    done = bench(name, "--smoke", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    about, *rows = map(json.loads, (tmp_path / f"{name}.json").read_text().splitlines())
    assert about["torch"] == torch.__version__
    assert rows
    assert all(row["wrong"] == [] and min(row["seconds"].values()) > 0 for row in rows)
    text = (tmp_path / "table.md").read_text()
    assert all(f"| {row['name']} |" in text for row in rows)


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
    assert "there are roof, rope, bias" in " ".join(done.output.split())


def test_ways_take_turns() -> None:
    order: list[str] = []
    case = Case("turns", {way: lambda way=way: order.append(way) for way in "ab"}, tolerance=None, repetitions=3)
    row = measure(case, "", smoke=False)
    assert "".join(order) == "ab" * (harness.WARM_UPS + 3)
    assert set(row["seconds"]) == {"a", "b"}


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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux keeps a high-water mark")
def test_memory_is_that_of_a_process_of_its_own() -> None:
    """FIRE over 1024 tokens: a dense one holds 32 numbers for each pair of tokens, ours of few tokens at a time."""
    sizes = {"length": 1024, "fire": 1}
    ours, dense = (peak_mib("recipes.bench.bias", way, sizes) for way in ("ours", "dense bias"))
    assert dense > 32 * 1024**2 * 4 / 2**20
    assert ours < dense / 3
    with pytest.raises(RuntimeError, match=r"recipes.bench.bias: absent at .* ended with 1:"):
        peak_mib("recipes.bench.bias", "absent", sizes | {"fire": 0})
