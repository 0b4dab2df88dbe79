"""The size of the package, and a ratchet on it: what is counted may only go down, points of the contract only up.

    python -m tests.house            # prints the table
    python -m tests.house --write    # keeps what got better in house.json; a number that got worse stays as it was

Lines of code are printed alone. A bound on them would ask for denser lines, and one on tests for fewer tests.
"""

from __future__ import annotations

import ast
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("house.json")
POINTS = "points of the contract"
KEPT = ("functions", "files", "95th percentile of a function's lines", "highest complexity", "annotations as Any")
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.FunctionDef)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Numbers = dict[str, int]


def measure(root: Path = ROOT) -> Numbers:
    """Return the numbers of the checkout at `root`, by what they count."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((root / "hf_posswap").rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)]
    lengths = [node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno is not None]
    releases = json.loads((root / "tests" / "contract" / "counts.json").read_text(encoding="utf-8"))
    newest = max(releases, key=lambda release: tuple(map(int, release.split("."))))
    tests = [path.read_text(encoding="utf-8") for path in (root / "tests").rglob("*.py")]
    return {
        "functions": len(functions),
        "files": len(texts),
        "95th percentile of a function's lines": round(statistics.quantiles(lengths, n=20)[-1]),
        "highest complexity": max(complexity(node) for node in functions),
        "annotations as Any": sum(count_any(tree) for tree in trees),
        "lines of the package": sum(len(text.splitlines()) for text in texts),
        "lines of tests": sum(len(text.splitlines()) for text in tests),
        POINTS: sum(releases[newest].values()),
    }


def complexity(function: Function) -> int:
    """Return the cyclomatic complexity of `function` as ruff's C901 counts it: branches of nested functions count."""
    nodes = list(ast.walk(function))
    clauses = sum(isinstance(node, ast.Try) and bool(node.orelse) for node in nodes)
    defaults = sum(isinstance(node, ast.match_case) and _takes_anything(node) for node in nodes)
    return sum(isinstance(node, BRANCHES) for node in nodes) + clauses - defaults


def _takes_anything(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def count_any(tree: ast.AST) -> int:
    """Return how many annotations of arguments, results and variables in `tree` name `Any`."""
    return sum(
        any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(one)) for one in _annotations(tree)
    )


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        one = node.returns if isinstance(node, Function) else getattr(node, "annotation", None)
        if one is not None:
            yield one


def read_kept() -> Numbers:
    """Return the committed numbers."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def problems(now: Numbers, kept: Numbers) -> list[str]:
    """Return a line for each number of `now` that is worse than the one in `kept`."""
    grown = [f"{name}: {now[name]:,}, {kept[name]:,} before" for name in KEPT if now[name] > kept[name]]
    return grown + ([f"{POINTS}: {now[POINTS]:,}, {kept[POINTS]:,} before"] if now[POINTS] < kept[POINTS] else [])


def improved(now: Numbers, kept: Numbers) -> Numbers:
    """Return the numbers to keep: the better one of each."""
    return {name: min(now[name], kept[name]) for name in KEPT} | {POINTS: max(now[POINTS], kept[POINTS])}


def main() -> None:
    """Print the table; with --write, keep what got better."""
    now, kept = measure(), read_kept()
    if "--write" in sys.argv[1:]:
        FILE.write_text(json.dumps(improved(now, kept), indent=2) + "\n", encoding="utf-8")
    lines = [f"{name:40}{number:>9,}" + (f"{kept[name]:>9,}" if name in kept else "") for name, number in now.items()]
    sys.stdout.write("\n".join([f"{'':40}{'now':>9}{'kept':>9}", *lines, *problems(now, kept), ""]))


if __name__ == "__main__":
    main()
