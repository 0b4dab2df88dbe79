"""The benchmarks' harness: interleaved timing of all alternatives on one thread; memory in a separate process.

A case passes only if all alternatives give the same numbers; times are only reported, next to the goal of each ratio.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posswap.utils.format import said_by

WARM_UPS = 2
NARROW = 0.02
"""Relative half-width of a ratio's interval at which measuring stops."""
MOST_TURNS = 5
"""Most repetitions of a case's turns to reach it."""
BUSY = 0.05
"""Share of the time without a free core above which numbers are unreliable."""
LOOSER = 1.3
"""Factor on goals in smoke runs."""
_MIB = 1 << 20
_RUN_APART = """
import importlib, json, sys
from pathlib import Path
import torch
from recipes.bench.harness import status
torch.set_num_threads(1)
module, way, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
runs = importlib.import_module(module).apart(way, **sizes)
peaks = {}
for name, run in runs.items() if isinstance(runs, dict) else [("", runs)]:
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    run()
    peaks[name] = (status("VmHWM") - before) / 2**20
print(json.dumps(peaks))
"""


@dataclass(frozen=True)
class Case:
    """Several implementations of one computation, ours first.

    Attributes:
        name: of the row.
        ways: implementations by name.
        goals: highest ratio of our time to another implementation's, by its name.
        tolerance: largest difference of any result from ours; None: results are not compared.
        unlike: implementations with other results, such as attention without a bias.
        repetitions: least repetitions of each implementation after the warm-ups: see `NARROW`.
        memory: sizes for the module's `apart`, measured in separate processes; None: memory is not measured.
        memory_goals: highest ratio of our peak to another implementation's, by its name.
        memory_beyond: most MiB by which our peak may exceed another implementation's, by its name.
        missing: peers that cannot run here, with the reason.
        seconds: most seconds for ours; None: only ratios count.
        device: "cuda": times by CUDA events, and peaks of all by the allocator if `memory` is not None.
    """

    name: str
    ways: Mapping[str, Callable[[], Any]]
    goals: Mapping[str, float] = field(default_factory=dict)
    tolerance: float | None = 1e-4
    unlike: frozenset[str] = frozenset()
    repetitions: int = 7
    memory: Mapping[str, int] | None = None
    memory_goals: Mapping[str, float] = field(default_factory=dict)
    memory_beyond: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    device: str = "cpu"


def measure(case: Case, module: str, *, smoke: bool) -> dict[str, Any]:
    """Return the measurements of one case as JSON; `wrong` names implementations whose results differ from ours."""
    wrong = _wrong(case)
    seconds = _seconds_of_gpu if case.device == "cuda" else _seconds
    times, waited = in_turns(case.ways, 1 if smoke else case.repetitions, seconds)
    ours, *others = case.ways
    row: dict[str, Any] = {
        "name": case.name,
        "wrong": wrong,
        "most_seconds": case.seconds,
        "missing": dict(case.missing),
        "turns": len(times[ours]),
        "waited": 0.0 if case.device == "cuda" else waited,
        "seconds": {way: statistics.median(way_times) for way, way_times in times.items()},
        "ratios": {
            way: {
                "of medians": statistics.median(times[ours]) / statistics.median(times[way]),
                "of minima": min(times[ours]) / min(times[way]),
                "interval": interval(times[ours], times[way])[1:],
                "goal": case.goals.get(way),
            }
            for way in others
        },
    }
    if case.memory is not None and (case.device == "cuda" or sys.platform == "linux"):
        compared = dict.fromkeys((ours, *case.memory_goals, *case.memory_beyond))
        on_gpu = case.device == "cuda"
        row["peak_mib"] = {
            way: _peak_on_gpu(case.ways[way]) if on_gpu else peak_mib(module, way, case.memory) for way in compared
        }
        row["peak_goals"], row["peak_beyond"] = dict(case.memory_goals), dict(case.memory_beyond)
    return row


def broken(name: str, error: Exception) -> dict[str, Any]:
    """Return the row of a case that raised `error`."""
    message = f"{type(error).__name__}: {said_by(error)}"
    trace = "".join(traceback.format_exception(error))
    return {"name": name, "wrong": [trace], "missing": {"everything": message}, "seconds": {}, "ratios": {}}


def _wrong(case: Case) -> list[str]:
    ours, *others = (way for way in case.ways if way not in case.unlike)
    if case.tolerance is None or not others:
        return []
    expected = _tensors(case.ways[ours]())
    problems = []
    for way in others:
        result = _tensors(case.ways[way]())
        far = max(float((a.double() - b.double()).abs().max()) for a, b in zip(expected, result, strict=True))
        if not far <= case.tolerance:
            problems.append(f"{way}: differs by {far:.2e}, allowed is {case.tolerance:.0e}")
    return problems


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def in_turns(
    ways: Mapping[str, Callable[[], Any]],
    repetitions: int,
    seconds: Callable[[Callable[[], Any]], float],
    most: int = MOST_TURNS,
    warm_ups: int = WARM_UPS,
) -> tuple[dict[str, list[float]], float]:
    """Return the times of each implementation by `seconds`, and the share of all time without a free core.

    Implementations are interleaved, so that other load affects all alike, until the ratios to the first one are stable
    or `most` times the repetitions are done; with one repetition they run once, after at most one warm-up.
    """
    times: dict[str, list[float]] = {way: [] for way in ways}
    started, core_seconds = time.perf_counter(), _core_seconds()
    warm_ups, turns = (warm_ups, most * repetitions) if repetitions > 1 else (min(warm_ups, 1), 1)
    for turn in range(warm_ups + turns):
        for way, run in ways.items():
            duration = seconds(run)
            if turn >= warm_ups:
                times[way].append(duration)
        if turn + 1 >= warm_ups + repetitions and _are_stable(times):
            break
    waited = 1 - (_core_seconds() - core_seconds) / (time.perf_counter() - started)
    return times, max(0.0, waited)


def _are_stable(times: Mapping[str, Sequence[float]]) -> bool:
    """Return whether the interval of each ratio of the first way's times to another's is narrow."""
    ours, *others = times.values()
    return all(
        high - low <= 2 * NARROW * middle
        for middle, low, high in (interval(ours, times_of_other) for times_of_other in others)
    )


def _core_seconds() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    try:
        import resource
    except ImportError:  # Windows: waiting cannot be measured
        return time.perf_counter()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def interval(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the median of the turns' ratios and the ends of its 95 % interval, by order statistics.

    Example:
        >>> interval([2.0, 4.0, 3.0], [1.0, 1.0, 1.0])
        [3.0, 2.0, 4.0]
    """
    ratios = sorted(a / b for a, b in zip(ours, others, strict=True))
    count, outside, out = len(ratios), 0.0, 0
    # the probability that at most `out` ratios are on one side of the true median
    while (outside := outside + math.comb(count, out) / 2**count) <= 0.025:
        out += 1
    low = max(0, out - 1)
    return [statistics.median(ratios), ratios[low], ratios[count - 1 - low]]


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _seconds_of_gpu(run: Callable[[], Any]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1000


def _peak_on_gpu(run: Callable[[], Any]) -> float:
    """Return the peak of PyTorch's GPU memory in MiB above the memory before the run."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - baseline) / _MIB


def peak_mib(module: str, way: str, sizes: Mapping[str, int]) -> float:
    """Return the peak memory in MiB of a module's `apart(way, **sizes)` in a separate process.

    Raises:
        RuntimeError: that process failed.
    """
    return in_a_process(module, way, sizes)[""]


def in_a_process(module: str, way: str, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the peaks in MiB of the functions from a module's `apart(way, **sizes)`: by name, or "" for one.

    Raises:
        RuntimeError: that process failed.
    """
    root = Path(__file__).resolve().parents[2]
    # glibc keeps freed memory, which hides peaks, unless large blocks are returned to the system
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)
    }  # fmt: skip
    command = [sys.executable, "-c", _RUN_APART, module, way, json.dumps(dict(sizes))]
    process = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(
            f"{module}: {way} at {dict(sizes)} ended with {process.returncode}:\n{process.stderr[-2000:]}"
        )
    return json.loads(process.stdout.splitlines()[-1])


def status(name: str) -> int:
    """Return a number of bytes from Linux's status of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def machine() -> dict[str, Any]:
    """Return what the measurements depend on: versions, threads and load."""
    import transformers

    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def table(rows: list[dict[str, Any]], *, smoke: bool) -> str:
    """Return the rows of `measure` as a Markdown table: a line per ratio, peak or missing peer."""
    lines = ["| what | against | ratio of medians | of minima | goal | |", "|---|---|---|---|---|---|"]
    slack = LOOSER if smoke else 1.0
    for row in rows:
        name = row["name"]
        for way, ratio in row["ratios"].items():
            goal, median_ratio = ratio["goal"], ratio["of medians"]
            goal_text = "" if goal is None else f"<= {goal:.4g}"
            verdict = _verdict(median_ratio, goal, slack)
            lines.append(f"| {name} | {way} | {_shown(ratio)} | {ratio['of minima']:.3f} | {goal_text} | {verdict} |")
        lines += _peaks(row, slack)
        lines += [
            f"| {name} | {peer} | NOT MEASURED | | | {reason} |" for peer, reason in row.get("missing", {}).items()
        ]
        if row["seconds"] and not row["ratios"]:
            (way, median_seconds), limit = next(iter(row["seconds"].items())), row["most_seconds"]
            goal_text = "" if limit is None else f"< {limit:g} s"
            lines.append(
                f"| {name} | {way}: {median_seconds:.4f} s | | | {goal_text} | {_verdict(median_seconds, limit, 1.0)} |"
            )
        if row.get("waited", 0.0) > BUSY:
            lines.append(f"| {name} | | | | | {doubt(row)} |")
    return "\n".join(lines)


def _shown(ratio: Mapping[str, Any]) -> str:
    if "interval" not in ratio:  # older results have none
        return f"{ratio['of medians']:.3f}"
    low, high = ratio["interval"]
    return f"{ratio['of medians']:.3f} ({low:.3f} to {high:.3f})"


def doubt(row: Mapping[str, Any]) -> str:
    """Return why the numbers of `row` are unreliable."""
    return f"the machine was busy: {row['waited']:.0%} of the time no core was free; measure it again"


def _verdict(value: float, goal: float | None, slack: float) -> str:
    return "" if goal is None else "reached" if value <= goal * slack else "missed"


def _peaks(row: dict[str, Any], slack: float) -> list[str]:
    """Return the lines of `table` on a row's memory."""
    if "peak_mib" not in row:
        return []
    our_peak, lines = next(iter(row["peak_mib"].values())), []
    name = f"{row['name']}: peak memory, {our_peak:.0f} MiB"
    for way, goal in row["peak_goals"].items():
        other_peak = row["peak_mib"][way]
        ratio = our_peak / max(other_peak, 1e-9)
        verdict = _verdict(ratio, goal, slack)
        lines.append(f"| {name} | {way}, {other_peak:.0f} MiB | {ratio:.3f} | | <= {goal:.3g} | {verdict} |")
    for way, most in row.get("peak_beyond", {}).items():
        other_peak = row["peak_mib"][way]
        verdict = _verdict(our_peak - other_peak, most, slack)
        lines.append(
            f"| {name} | {way}, {other_peak:.0f} MiB | {our_peak - other_peak:+.0f} MiB | | <= {most:+.0f} MiB "
            f"| {verdict} |"
        )
    return lines


def attention_inputs(length: int, heads: int = 12, width: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return random query, key and value [1, H, L, D] in a model's memory layout."""
    source = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(1, length, heads, width, generator=source).transpose(1, 2) for _ in range(3)
    )


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], list[Tensor]]:
    """Return a function that runs forward and backward, and returns the gradients of `inputs`."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def both() -> list[Tensor]:
        with torch.enable_grad():
            out = run(*leaves)
            return list(torch.autograd.grad(out, leaves, torch.ones_like(out)))

    return both
