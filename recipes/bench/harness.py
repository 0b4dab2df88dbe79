"""How the benchmarks measure: all ways of one thing in one process, in turns, on one thread; memory in a process apart.

A case passes only if all ways give the same numbers; how fast they are is a report, beside the goal of each ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posswap.utils.format import said_by

WARM_UPS = 2
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
        repetitions: of each way, after the warm-ups.
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
    times = _times(case.ways, 1 if smoke else case.repetitions, case.device)
    ours, *others = case.ways
    row: dict[str, Any] = {
        "name": case.name,
        "wrong": wrong,
        "most_seconds": case.seconds,
        "missing": dict(case.missing),
        "seconds": {way: statistics.median(taken) for way, taken in times.items()},
        "ratios": {
            way: {
                "of medians": statistics.median(times[ours]) / statistics.median(times[way]),
                "of minima": min(times[ours]) / min(times[way]),
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


def _times(ways: Mapping[str, Callable[[], Any]], repetitions: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of each way, run in turns so that what else the machine does falls on all alike."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(WARM_UPS + repetitions if repetitions > 1 else 2):
        for way, run in ways.items():
            taken = _seconds(run, device)
            if turn >= (WARM_UPS if repetitions > 1 else 1):
                times[way].append(taken)
    return times


def _seconds(run: Callable[[], Any], device: str) -> float:
    if device != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
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
            lines.append(f"| {name} | {way} | {found:.3f} | {ratio['of minima']:.3f} | {shown} | {said} |")
        lines += _peaks(row, slack)
        lines += [f"| {name} | {peer} | NOT MEASURED | | | {why} |" for peer, why in row.get("missing", {}).items()]
        if row["seconds"] and not row["ratios"]:
            (way, taken), most = next(iter(row["seconds"].items())), row["most_seconds"]
            shown = "" if most is None else f"< {most:g} s"
            lines.append(f"| {name} | {way}: {taken:.4f} s | | | {shown} | {_verdict(taken, most, 1.0)} |")
    return "\n".join(lines)


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
