"""Try all mutations, or those whose names contain one of the words given, and print what became of the swaps.

With `--serve`, read mutations from the standard input and answer each with a line of JSON: what the tests run.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from tests.mutations import running
from tests.mutations.mutations import MUTATIONS


def main() -> None:
    """Run the command."""
    start = time.perf_counter()
    running.prepare()
    known = running.truth()
    if problems := running.unfit(known):
        raise SystemExit("\n".join(problems))
    if sys.argv[1:] == ["--serve"]:
        for line in sys.stdin:
            name, plant = json.loads(line)
            outcomes = running.run(MUTATIONS[name], known, running.PLANTS[plant] if plant else None)
            _say(json.dumps([dataclasses.asdict(one) for one in outcomes]))
        return
    results = {}
    for name, mutation in MUTATIONS.items():
        if not sys.argv[1:] or any(word in name for word in sys.argv[1:]):
            results[name] = running.run(mutation, known)
            _say(running.rows(name, results[name]))
    _say(running.total(results))
    _say(f"{time.perf_counter() - start:.0f} s")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
