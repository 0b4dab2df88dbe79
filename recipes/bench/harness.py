"""How the benchmarks measure: all ways of one thing in one process, in turns, on one thread; memory in a process apart.

A case passes only if all ways give the same numbers; how fast they are is a report, beside the goal of each ratio.
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
"""How far the ends of a ratio's interval may lie from it, as a share of it: then no more turns are needed."""
MOST_TURNS = 5
"""How often the turns of a case are repeated for that, at most."""
BUSY = 0.05
"""Share of its time that a way may wait for a core before its numbers are doubted."""
LOOSER = 1.3
"""What goals are multiplied by in smoke runs."""
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
    """Several ways of computing one thing, ours first.

    Attributes:
        name: of the row.
        ways: name to what runs it.
        goals: name of another way to the highest ratio of our time to its.
        tolerance: largest difference of any way's result from ours; None: the results are not to be compared.
        unlike: ways whose results are something else, such as attention without a bias.
        repetitions: of each way, after the warm-ups, at least: see `NARROW`.
        memory: sizes for `apart` of the module, whose ways are measured in processes of their own; None: no memory.
        memory_goals: name of another way to the highest ratio of our peak to its.
        memory_beyond: name of another way to the most MiB by which our peak may lie above its.
        missing: peers that cannot run here, to the reason.
        seconds: most that ours may take; None: only ratios count.
        device: "cuda": CUDA events tell the time, and the allocator the peaks of all ways, if `memory` is not None.
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
    """Return the numbers of one case as JSON; `wrong` names the ways whose results differ from ours."""
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
        "seconds": {way: statistics.median(taken) for way, taken in times.items()},
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
    said = f"{type(error).__name__}: {said_by(error)}"
    traced = "".join(traceback.format_exception(error))
    return {"name": name, "wrong": [traced], "missing": {"everything": said}, "seconds": {}, "ratios": {}}


def _wrong(case: Case) -> list[str]:
    ours, *others = (way for way in case.ways if way not in case.unlike)
    if case.tolerance is None or not others:
        return []
    expected = _tensors(case.ways[ours]())
    wrong = []
    for way in others:
        found = _tensors(case.ways[way]())
        far = max(float((a.double() - b.double()).abs().max()) for a, b in zip(expected, found, strict=True))
        if not far <= case.tolerance:
            wrong.append(f"{way}: differs by {far:.2e}, allowed is {case.tolerance:.0e}")
    return wrong


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def in_turns(
    ways: Mapping[str, Callable[[], Any]],
    repetitions: int,
    seconds: Callable[[Callable[[], Any]], float],
    most: int = MOST_TURNS,
) -> tuple[dict[str, list[float]], float]:
    """Return what `seconds` says of each way, and the share of all the time in which no core was free.

    The ways are run in turns, so that what else the machine does falls on all alike, and until each ratio to the first
    way stands, or for `most` times the repetitions; with one repetition once, after one warm-up.
    """
    times: dict[str, list[float]] = {way: [] for way in ways}
    started, used = time.perf_counter(), _core_seconds()
    warm_ups, turns = (WARM_UPS, most * repetitions) if repetitions > 1 else (1, 1)
    for turn in range(warm_ups + turns):
        for way, run in ways.items():
            taken = seconds(run)
            if turn >= warm_ups:
                times[way].append(taken)
        if turn + 1 >= warm_ups + repetitions and _stand(times):
            break
    waited = 1 - (_core_seconds() - used) / (time.perf_counter() - started)
    return times, max(0.0, waited)


def _stand(times: Mapping[str, Sequence[float]]) -> bool:
    """Return whether the interval of each ratio of the first way's times to another's is narrow."""
    ours, *others = times.values()
    return all(high - low <= 2 * NARROW * middle for middle, low, high in (interval(ours, one) for one in others))


def _core_seconds() -> float:
    """Return the seconds for which this process and those that it waited for had a core."""
    try:
        import resource
    except ImportError:  # Windows: what waits there is not told from what runs elsewhere
        return time.perf_counter()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def interval(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the median of the ratios of each turn, and the ends of its interval of 95 %, by order statistics.

    Example:
        >>> interval([2.0, 4.0, 3.0], [1.0, 1.0, 1.0])
        [3.0, 2.0, 4.0]
    """
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    count, outside, out = len(ratios), 0.0, 0
    # the chance that fewer than `out` + 1 of the ratios lie on one side of the true median
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
    """Return the peak of the memory that PyTorch takes on the GPU beyond what was taken before, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / _MIB


def peak_mib(module: str, way: str, sizes: Mapping[str, int]) -> float:
    """Return the peak of `apart(way, **sizes)` of a module beyond what was there before, in a process of its own.

    Raises:
        RuntimeError: that process failed.
    """
    return in_a_process(module, way, sizes)[""]


def in_a_process(module: str, way: str, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the peaks in MiB of what `apart(way, **sizes)` of a module gives: by name, or one, called "".

    Raises:
        RuntimeError: that process failed.
    """
    root = Path(__file__).resolve().parents[2]
    # glibc keeps what was freed, and hides the peaks, unless large blocks go back to the system
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)
    }  # fmt: skip
    command = [sys.executable, "-c", _RUN_APART, module, way, json.dumps(dict(sizes))]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module}: {way} at {dict(sizes)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def status(name: str) -> int:
    """Return a number of bytes from what Linux says of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: versions, threads and load."""
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
    """Return the rows of `measure` as a Markdown table: one line a ratio, a peak, or a peer that is not there."""
    lines = ["| what | against | ratio of medians | of minima | goal | |", "|---|---|---|---|---|---|"]
    slack = LOOSER if smoke else 1.0
    for row in rows:
        name = row["name"]
        for way, ratio in row["ratios"].items():
            goal, found = ratio["goal"], ratio["of medians"]
            shown = "" if goal is None else f"<= {goal:.4g}"
            said = _verdict(found, goal, slack)
            lines.append(f"| {name} | {way} | {_shown(ratio)} | {ratio['of minima']:.3f} | {shown} | {said} |")
        lines += _peaks(row, slack)
        lines += [f"| {name} | {peer} | NOT MEASURED | | | {why} |" for peer, why in row.get("missing", {}).items()]
        if row["seconds"] and not row["ratios"]:
            (way, taken), most = next(iter(row["seconds"].items())), row["most_seconds"]
            shown = "" if most is None else f"< {most:g} s"
            lines.append(f"| {name} | {way}: {taken:.4f} s | | | {shown} | {_verdict(taken, most, 1.0)} |")
        if row.get("waited", 0.0) > BUSY:
            lines.append(f"| {name} | | | | | {doubt(row)} |")
    return "\n".join(lines)


def _shown(ratio: Mapping[str, Any]) -> str:
    if "interval" not in ratio:  # of results that were measured before there was one
        return f"{ratio['of medians']:.3f}"
    low, high = ratio["interval"]
    return f"{ratio['of medians']:.3f} ({low:.3f} to {high:.3f})"


def doubt(row: Mapping[str, Any]) -> str:
    """Return why the numbers of `row` are not to be believed."""
    return f"the machine was busy: {row['waited']:.0%} of the time no core was free; measure it again"


def _verdict(found: float, goal: float | None, slack: float) -> str:
    return "" if goal is None else "reached" if found <= goal * slack else "missed"


def _peaks(row: dict[str, Any], slack: float) -> list[str]:
    """Return the lines of a row of `table` that tell of memory."""
    if "peak_mib" not in row:
        return []
    ours, lines = next(iter(row["peak_mib"].values())), []
    name = f"{row['name']}: peak memory, {ours:.0f} MiB"
    for way, goal in row["peak_goals"].items():
        theirs = row["peak_mib"][way]
        found = ours / max(theirs, 1e-9)
        said = _verdict(found, goal, slack)
        lines.append(f"| {name} | {way}, {theirs:.0f} MiB | {found:.3f} | | <= {goal:.3g} | {said} |")
    for way, most in row.get("peak_beyond", {}).items():
        theirs = row["peak_mib"][way]
        said = _verdict(ours - theirs, most, slack)
        lines.append(f"| {name} | {way}, {theirs:.0f} MiB | {ours - theirs:+.0f} MiB | | <= {most:+.0f} MiB | {said} |")
    return lines


def attention_inputs(length: int, heads: int = 12, width: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value [1, H, L, D] laid out as a model's are, of random numbers."""
    source = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(1, length, heads, width, generator=source).transpose(1, 2) for _ in range(3)
    )


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], list[Tensor]]:
    """Return what runs forward and backward, and gives the gradients of `inputs`."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def both() -> list[Tensor]:
        with torch.enable_grad():
            out = run(*leaves)
            return list(torch.autograd.grad(out, leaves, torch.ones_like(out)))

    return both
