"""Text that requires looking far back: pretraining data for a base that finds needles.

    python -m recipes.studies.puzzles puzzles --documents 60000
    python recipes/pretrain.py llama finder --text puzzles --window 128 --width 128 --vocabulary 512 --tokens 6000000

Small models learn to look back from text that requires it everywhere, and hardly from needles in filler: one answer of
five tokens is a small part of a window. Most documents are therefore dense: names with numbers that are all repeated,
and lists that come twice. The rest are passkeys in the format of `hf_posswap.evaluation`, with filler of any length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from hf_posswap.cli.outcome import script
from hf_posswap.errors import DataError
from hf_posswap.evaluation.passkey import FILLER, LARGEST_KEY, NEEDLE, QUESTION
from hf_posswap.utils.atomic_io import writable_folder, write_text

_NAMES = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "larch",
    "maple", "north", "ocean", "prism", "quartz", "ridge", "stone", "tulip", "umbra", "valley", "willow", "zephyr",
)  # fmt: skip
IN_A_WINDOW = 7
"""Half lines of filler around a passkey in a window of 128 tokens."""
_FILE = 10_000
"""Documents of a file."""


def pairs(random: np.random.Generator, filler: int) -> str:
    """Return names with numbers, and then the same pairs in another order."""
    count = int(random.integers(2, 8))
    names = [str(name) for name in random.choice(_NAMES, count, replace=False)]
    facts = [f"{name} {random.integers(1, LARGEST_KEY + 1)}" for name in names]
    repeated = [facts[int(i)] for i in random.permutation(count)]
    return f"{', '.join(facts)}\n{_separating_filler(random, filler)}{', '.join(repeated)}\n"


def copy(random: np.random.Generator, filler: int) -> str:
    """Return a list of numbers and names, twice."""
    count = int(random.integers(3, 11))
    items = [
        str(random.choice(_NAMES)) if random.random() < 0.3 else str(random.integers(1, 1000)) for _ in range(count)
    ]
    return f"{' '.join(items)}\n{_separating_filler(random, filler)}{' '.join(items)}\n"


def passkey(random: np.random.Generator, filler: int) -> str:
    """Return a passkey in up to `filler` half lines of filler, and the question with its answer."""
    key = int(random.integers(1, LARGEST_KEY + 1))
    lines = _lines(int(random.integers(0, filler + 1)))
    start = int(random.integers(0, len(lines) + 1))
    return f"{lines[:start]}{NEEDLE.format(key=key)}{lines[: len(lines) - start]}{QUESTION} {key}"


def _lines(halves: int) -> str:
    return (FILLER * (halves // 2 + 1))[: halves * len(FILLER) // 2]


def _separating_filler(random: np.random.Generator, filler: int) -> str:
    """Return filler between the halves of a dense document; none if all fits into a window of the base."""
    lines = _lines(int(random.integers(0, max(0, filler - IN_A_WINDOW) + 1)))
    return f"{lines}\n" if lines else ""


KINDS = {pairs: 0.4, copy: 0.2, passkey: 0.4}
"""Shares of the documents."""


def documents(count: int, filler: int, seed: int) -> list[str]:
    """Return `count` documents that depend on the seed alone."""
    random = np.random.default_rng(seed)
    chosen = random.choice(len(KINDS), count, p=list(KINDS.values()))
    return [list(KINDS)[index](random, filler) for index in chosen]


def main(
    out: Annotated[Path, typer.Argument(help="The folder to write into.")],
    count: Annotated[int, typer.Option("--documents", min=1, help="How many.")] = 60_000,
    filler: Annotated[
        int, typer.Option(min=0, help="Most halves of the filler's line around a passkey, 12 tokens each.")
    ] = IN_A_WINDOW,
    seed: Annotated[int, typer.Option(min=0, help="Of all of them.")] = 0,
) -> None:
    """Write documents of puzzles as JSON lines, several files of them."""
    folder = writable_folder(out)
    others = sorted(path.name for path in folder.iterdir() if not path.match("puzzles-*.jsonl"))
    if others:
        raise DataError(f"{out} holds {others[0]} already, which would be read as text too: give a new folder.")
    for path in folder.glob("puzzles-*.jsonl"):
        path.unlink()
    write_documents(folder, count, filler, seed)


def write_documents(folder: Path, count: int, filler: int, seed: int) -> None:
    """Write `documents` into files of JSON lines."""
    lines = [json.dumps({"text": text}) for text in documents(count, filler, seed)]
    for first in range(0, count, _FILE):
        write_text(folder / f"puzzles-{first // _FILE}.jsonl", "\n".join(lines[first : first + _FILE]) + "\n")


app = script(main)

if __name__ == "__main__":
    app()
