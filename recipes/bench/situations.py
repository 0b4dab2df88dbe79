"""The cost of a swap in typical use, compared with the unswapped model: padded, packed and cached batches.

    python -m recipes.bench.situations                                   # all: about 40 minutes
    python -m recipes.bench.situations --schemes alibi,t5 --cases "left-padded,decoding after 512"
    python -m recipes.bench.situations --small                           # tiny sizes: checks that it runs
    python -m recipes.bench.situations --out rows.json --resume          # resumes an interrupted run

All models of a case are interleaved on one thread. The measure is the thread's CPU time, which excludes other load, as
a ratio to the unswapped model's in the same turn; the median ratio is printed with its 95 % interval. Memory is the
peak of a separate process.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_posswap import patch_model, set_backend
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.atomic_io import write_text
from recipes.bench.batches import DECODING, Situation, Sizes, forward, ids_of, padded, situations
from recipes.bench.harness import BUSY, WARM_UPS, doubt, in_a_process, in_turns, interval, machine

MODULE = "recipes.bench.situations"
UNPATCHED = "unpatched"
MEMORY = "memory"
SCHEMES: dict[str, dict[str, Any]] = {
    "alibi": {}, "t5": {"init_std": 1.0}, "kerple": {}, "fire": {}, "self_extend": {}, "rerope": {}, "dual_chunk": {},
    "xpos": {}, "dynamic": {},
}  # fmt: skip
GOALS = {
    **dict.fromkeys(("alibi", "t5", "kerple", "fire"), (1.15, 1.03)),
    **dict.fromkeys(("self_extend", "rerope", "dual_chunk"), (1.4, 1.25)),
}  # fmt: skip
"""Highest ratio of a forward, and of a decoded token; schemes without an entry have no goal."""
MOST_TURNS = 2
"""Most repetitions of the turns for stable ratios: a turn runs ten models."""
TOLERANCE = 1e-3
"""Largest difference of logits between the chosen backend and the formula, for weights of size 0.1."""


FULL, SMALL = Sizes(2048, 512, 3, 4096, (512, 2048, 8192)), Sizes(64, 32, 1, 64, (24,))


def models_of(schemes: Sequence[str], sizes: Sizes, window: int | None) -> dict[str, Any]:
    """Return an unswapped model and one for each scheme."""
    return {name: llama(name, sizes, window) for name in (UNPATCHED, *schemes)}


def llama(scheme: str, sizes: Sizes, window: int | None = None) -> Any:
    """Return a Llama with random weights, made for half the length of the text, and swapped to `scheme`.

    With `window` it is a Mistral, a Llama with sliding-window layers.
    """
    torch.manual_seed(0)
    heads = max(1, sizes.width // 64)
    shape: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": sizes.width, "intermediate_size": sizes.width * 11 // 4,
        "num_hidden_layers": sizes.layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "max_position_embeddings": sizes.length // 2, "initializer_range": 0.1,
    }  # fmt: skip
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**shape))
        if window is None
        else MistralForCausalLM(MistralConfig(**shape, sliding_window=window))
    )
    if scheme != UNPATCHED:
        patch_model(model, scheme, max_length=8 * sizes.length, **SCHEMES.get(scheme, {}))
    return model.eval()


def rows(smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each situation, and one for memory: see `measured`."""
    sizes = SMALL if smoke else FULL
    # memory is measured at full size only
    selected = [situation.name for situation in situations(sizes)] if smoke else None
    yield from measured(sizes, tuple(SCHEMES), selected, 1 if smoke else 7)


def measured(
    sizes: Sizes, schemes: Sequence[str], wanted: Sequence[str] | None, repetitions: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each situation in `wanted` (None: all), and for memory.

    A row has the seconds of the unpatched model and of each scheme, the ratios to it (median and interval), and under
    `wrong` the schemes whose chosen backend differs from the formula.
    """
    with torch.no_grad():
        build_models = functools.cache(functools.partial(models_of, schemes, sizes))
        for situation in situations(sizes):
            if wanted is None or situation.name in wanted:
                yield _row(situation, build_models(situation.window), repetitions)
    if wanted is None or MEMORY in wanted:
        yield _memory(sizes, schemes)


def _row(situation: Situation, models: Mapping[str, Any], repetitions: int) -> dict[str, Any]:
    runs = {name: situation.make(model) for name, model in models.items()}
    problems = [
        f"{name}: {problem}"
        for name in runs
        if name != UNPATCHED and (problem := _far(situation, models[name], runs[name]))
    ]
    return timed_row(situation.name, runs, repetitions, most=MOST_TURNS) | {"wrong": problems}


def timed_row(
    name: str, runs: Mapping[str, Callable[[], Any]], repetitions: int, *, most: int, warm_ups: int = WARM_UPS
) -> dict[str, Any]:
    """Return the CPU seconds of `runs`, in turns, and the ratios to the unpatched model's; arguments as `in_turns`."""
    return times_row(name, *in_turns(runs, repetitions, cpu_seconds, most, warm_ups))


def times_row(name: str, times: Mapping[str, Sequence[float]], waited: float) -> dict[str, Any]:
    """Return the row of what `in_turns` returned."""
    return {
        "name": name,
        "wrong": [],
        "missing": {},
        "turns": len(times[UNPATCHED]),
        "waited": waited,
        "seconds": {name: statistics.median(durations) for name, durations in times.items()},
        "ratios": {
            name: interval(durations, times[UNPATCHED]) for name, durations in times.items() if name != UNPATCHED
        },
    }


def cpu_seconds(run: Callable[[], Any]) -> float:
    """Return the CPU seconds of this thread, which other load affects less."""
    started = time.thread_time()
    run()
    return time.thread_time() - started


def _far(situation: Situation, model: Any, run: Callable[[], Tensor]) -> str | None:
    """Return the difference of the chosen backend from the formula if it is too large."""
    if not any(isinstance(module, Mechanism) for module in model.modules()):
        return None  # stock transformers computes it
    logits = run()
    set_backend(model, "plain")
    try:
        expected = situation.make(model)()
    finally:
        set_backend(model, "auto")
    differences = (logits - expected).abs()
    largest = float((differences if situation.real is None else differences[situation.real]).max())
    return None if largest <= TOLERANCE else f"auto and plain differ by {largest:.2e}, allowed is {TOLERANCE:.0e}"


def _memory(sizes: Sizes, schemes: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": f"memory of {sizes.memory}, left-padded", "wrong": [], "missing": {}, "seconds": {}}
    if sys.platform != "linux":
        return row | {"ratios": {}, "missing": {"memory": "only Linux measures it"}}
    chosen = {"length": sizes.memory, "width": sizes.width, "layers": sizes.layers}
    peaks = {name: in_a_process(MODULE, name, chosen)[""] for name in (UNPATCHED, *schemes)}
    ratios = {name: [peak / peaks[UNPATCHED]] * 3 for name, peak in peaks.items() if name != UNPATCHED}
    return row | {"peak_mib": peaks, "ratios": ratios}


def apart(scheme: str, length: int, width: int, layers: int) -> Callable[[], Any]:
    """Return a function that runs two rows, one left-padded, to measure its memory in a separate process."""
    sizes = Sizes(length, width, layers, length, ())
    run = forward(llama(scheme, sizes), ids_of(2, length), **padded(length)[0])
    with torch.no_grad():
        forward(llama(scheme, sizes._replace(length=64)), ids_of(1, 64))()  # loads what the first call needs

    def without_gradients() -> Any:
        with torch.no_grad():
            return run()

    return without_gradients


def load_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows written to `path` so far."""
    _, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return rows


def table(
    rows: list[dict[str, Any]], *, smoke: bool, goals: Mapping[str, tuple[float, float]] = MappingProxyType(GOALS)
) -> str:
    """Return the rows as a Markdown table: a line per situation, a column per scheme; missed `goals` are bold."""
    schemes = list(rows[0]["ratios"])
    lines = [f"| ratio to unswapped | {' | '.join(schemes)} |", "|---" * (len(schemes) + 1) + "|"]
    for row in rows:
        cells = [_cell(row, scheme, goals) for scheme in schemes]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
        if "peak_mib" in row:
            peaks = " | ".join(f"{row['peak_mib'][scheme]:.0f} MiB" for scheme in schemes)
            lines.append(f"| the same, unswapped {row['peak_mib'][UNPATCHED]:.0f} MiB | {peaks} |")
    stated = ", ".join(f"{name} {most:g} ({step:g})" for name, (most, step) in goals.items())
    doubted = [f"{row['name']}: {doubt(row)}." for row in rows if row.get("waited", 0.0) > BUSY]
    return "\n".join([*lines, "", *doubted, f"Goals, of a forward and (of decoding): {stated}. Missed ones are bold."])


def _cell(row: dict[str, Any], scheme: str, goals: Mapping[str, tuple[float, float]]) -> str:
    if scheme not in row["ratios"]:
        return ""
    middle, low, high = row["ratios"][scheme]
    shown = f"{middle:.2f}" if low == high else f"{middle:.2f} ({low:.2f} to {high:.2f})"
    goal = goals.get(scheme, (math.inf, math.inf))[row["name"].startswith(DECODING)]
    return f"**{shown}**" if middle > goal and "peak_mib" not in row else shown


def main(
    schemes: Annotated[str, typer.Option(help=f"Of {', '.join(SCHEMES)}, by commas.")] = ",".join(SCHEMES),
    cases: Annotated[str, typer.Option(help="Names of situations, and 'memory', by commas; none: all.")] = "",
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes, one repetition.")] = False,
    repetitions: Annotated[int, typer.Option(help="Turns that count at least.")] = 7,
    out: Annotated[Path | None, typer.Option(help="A file for the rows, as JSON; none: they are printed only.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that the file has.")] = False,
) -> None:
    """Measure the selected cases and print the table."""
    torch.set_num_threads(1)
    selected = [name.strip() for name in cases.split(",")] if cases else None
    sizes, scheme_names, turns = (SMALL if small else FULL), schemes.split(","), 1 if small else repetitions
    known = [*(situation.name for situation in situations(sizes)), MEMORY]
    if unknown := sorted({*scheme_names} - {*SCHEMES}) or sorted({*(selected or ())} - {*known}):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join([*SCHEMES, *known])}.")
    header = machine() | {"smoke": small}
    collected = load_rows(out) if resume and out is not None and out.exists() else []
    done_names = {MEMORY if "peak_mib" in row else row["name"] for row in collected}
    for row in measured(sizes, scheme_names, [name for name in selected or known if name not in done_names], turns):
        collected.append(row)
        typer.echo(table([row], smoke=small).splitlines()[2])
        if out is not None:
            write_text(out, "\n".join(map(json.dumps, [header, *collected])) + "\n")
    typer.echo(f"\n`{json.dumps(header | {'load after': machine()['load']})}`\n\n{table(collected, smoke=small)}")
    if wrong := [f"{row['name']}: {problem}" for row in collected for problem in row["wrong"]]:
        typer.echo("\n".join(["different numbers:", *wrong]), err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
