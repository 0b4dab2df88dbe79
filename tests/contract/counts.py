"""How many cases of each point the contract runs, by release of transformers: fewer than before is a failure.

A point that asks the wrong question of a new release (does it take `past_key_values`?) runs on no pair, and passes.

    python -m tests.contract.counts            # prints what the installed transformers has, and the last row
    python -m tests.contract.counts --write    # keeps it as this release's row of counts.json
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_posswap.testing.tiny import language_models
from hf_posswap.utils.atomic_io import read_json, write_json
from tests.contract.pairs import supported_pairs
from tests.stock import RELEASE, model_class, takes_cache

FILE = Path(__file__).with_name("counts.json")
KINDS = {
    "cached": r"cache|step|prefix",
    "padded": r"pad",
    "beam": r"beam",
    "generate": r"generat",
    "gradients": r"gradient|train|learn|lora|optimi",
}
"""Kinds of points, by words in their names and in those of their parameters; a point may be of several."""
LIGHT = "test_light: classes that take a cache"

Counts = dict[str, int]


def points() -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield the name of each point, with its parameters' names, the marks `pairs` and the marks `parametrize` of it."""
    for path in sorted(FILE.parent.glob("test_*.py")):
        module = importlib.import_module(f"{__package__}.{path.stem}")
        for name, function in vars(module).items():
            if name.startswith("test_") and "pair" in inspect.signature(function).parameters:
                marks = _marks(module) + _marks(function)
                parameters = [mark for mark in marks if mark.name == "parametrize"]
                asked = ",".join(str(mark.args[0]) for mark in parameters)
                point = f"{path.stem}.{name}" + (f"[{asked}]" if asked else "")
                yield point, [mark.args[0] for mark in marks if mark.name == "pairs"], parameters


def _marks(held: Any) -> list[Any]:
    marks = getattr(held, "pytestmark", [])
    return list(marks) if isinstance(marks, list) else [marks]


def count() -> Counts:
    """Return on how many cases each point runs where all of them are asked for."""
    pairs = supported_pairs()
    found = {}
    for point, wanted, parameters in points():
        accepted = sum(all(accepts(pair) for accepts in wanted) for pair in pairs)
        found[point] = accepted * math.prod(len(list(mark.args[1])) for mark in parameters)
    return found


def count_light() -> Counts:
    """Return how many language model classes take a cache, by their signatures: the light contract steps through it."""
    return {LIGHT: sum(takes_cache(model_class(name)) for name in language_models())}


def by_kind(counts: Counts) -> Counts:
    """Return the cases of each kind, and of all points."""
    kinds = {
        kind: sum(n for point, n in counts.items() if re.search(words, point.lower())) for kind, words in KINDS.items()
    }
    return kinds | {"all": sum(counts.values())}


def rows() -> dict[tuple[int, ...], Counts]:
    """Return the counts that are kept, by release, the oldest first."""
    held = {tuple(map(int, release.split("."))): counts for release, counts in read_json(FILE).items()}
    return dict(sorted(held.items()))


def row_for(release: tuple[int, ...]) -> Counts:
    """Return the counts to compare those of `release` with: its own row, or the newest one."""
    held = rows()
    return held.get(release) or held[max(held)]


def lost(now: Counts, before: Counts) -> dict[str, str]:
    """Return the points of `before` that run on fewer cases now, with both counts."""
    return {point: f"{now.get(point, 0)} of {n}" for point, n in before.items() if now.get(point, 0) < n}


def main(arguments: list[str]) -> None:
    """Print the counts by kind, and keep them where `--write` is among the arguments."""
    counts = count() | count_light()
    kept = rows() if FILE.exists() else {}
    sys.stdout.write(f"{'.'.join(map(str, RELEASE))}: {by_kind(counts)}\n")
    for release, row in kept.items():
        sys.stdout.write(f"kept {'.'.join(map(str, release))}: {by_kind(row)}, fewer now: {lost(counts, row)}\n")
    if "--write" in arguments:
        kept[RELEASE] = counts
        write_json(FILE, {".".join(map(str, release)): row for release, row in sorted(kept.items())})


if __name__ == "__main__":
    main(sys.argv[1:])
