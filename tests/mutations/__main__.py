"""Try all mutations, or those whose names contain what is given, and print what became of the swaps.

With `--serve`, read names on the standard input and answer each with a line of JSON: what the tests run.
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
    wanted = sys.argv[1:]
    start = time.perf_counter()
    running.prepare()
    known = running.truth()
    print(f"the library of today: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if wanted == ["--serve"]:
        for line in sys.stdin:
            outcomes = running.run(MUTATIONS[json.loads(line)], known)
            print(json.dumps([dataclasses.asdict(one) for one in outcomes]), flush=True)
        return
    results = {}
    for name, mutation in MUTATIONS.items():
        if not wanted or any(word in name for word in wanted):
            before = time.perf_counter()
            results[name] = running.run(mutation, known)
            print(f"{name}: {time.perf_counter() - before:.1f} s", file=sys.stderr)
            for one in results[name]:
                if one.verdict not in ("survives", "refused") or len(MUTATIONS) > 0 and wanted and one.verdict == "refused":
                    print(f"   {one.verdict:8} {one.case} {one.scheme or '(stock)'}: {one.detail}", file=sys.stderr)
    print(running.table(results))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
