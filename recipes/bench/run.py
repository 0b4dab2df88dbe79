"""Runs the benchmarks: the cost of each swap compared with the unswapped model and with other packages.

    python -m recipes.bench.run                       # all, on a quiet machine: hours
    python -m recipes.bench.run bias merge            # some
    python -m recipes.bench.run pretrained --resume   # keeps the rows that its file has, and measures the others
    python -m recipes.bench.run --smoke --out small   # tiny sizes: checks that all results agree, and a report

Each case is repeated until its ratios are stable; their intervals are printed. If no core was free for part of the
time, the row is marked as unreliable.

Writes NAME.json, one row per line, and table.md of all results in the folder, after each row: what is stopped keeps
those that it has. The exit code is 1 if two implementations
disagree or a benchmark fails; a missed goal is only reported in the table.
"""

from __future__ import annotations

import importlib
import inspect
import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_posswap.utils.atomic_io import write_text
from recipes.bench.harness import BUSY, broken, doubt, machine, measure, table

NAMES = ("roof", "rope", "angles", "bias", "merge", "ppl", "train", "patch", "decode", "compiled", "load", "waiting",
         "busy", "growth", "situations", "pretrained", "gpu")  # fmt: skip


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(NAMES)}; none: all.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes, one repetition.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows of an earlier run, of the benchmarks that can resume.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path(__file__).parent / "results",
) -> None:
    """Run the benchmarks and save the results."""
    unknown = sorted(set(names or ()) - set(NAMES))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(NAMES)}.")
    torch.set_num_threads(1)
    wrong: list[str] = []
    for name in names or NAMES:
        header, path = machine() | {"smoke": smoke}, out / f"{name}.json"
        rows, has_earlier = _earlier_rows(name, path, header) if resume else [], path.exists()
        try:
            for row in _rows(name, smoke, [row["name"] for row in rows]):
                rows = [*(earlier for earlier in rows if earlier["name"] != row["name"]), row]
                if has_earlier and not any(row["seconds"] for row in rows):
                    continue  # hours of an earlier run are not replaced by a row that says why there is none
                write_text(path, "\n".join(map(json.dumps, [header, *rows])) + "\n")
                write_text(out / "table.md", report(out))
        except Exception:  # the other benchmarks still run
            wrong.append(f"{name}: {traceback.format_exc()}")
            continue
        if not any(row["seconds"] for row in rows):
            reasons = {f"{what}: {why}" for row in rows for what, why in row["missing"].items()}
            kept = f", and {path} is left as it is" if has_earlier else ""
            typer.echo(f"{name}: nothing was measured{kept}. {'; '.join(sorted(reasons))}", err=True)
        wrong += [f"{name}: {row['name']}: {problem}" for row in rows for problem in row["wrong"]]
    typer.echo(report(out))
    if wrong:
        typer.echo("\n".join(["different numbers, or a benchmark that broke:", *wrong]), err=True)
        raise typer.Exit(1)


def _earlier_rows(name: str, path: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the measured rows of an earlier run of a benchmark that can resume; others start anew."""
    if not _can_resume(importlib.import_module(f"recipes.bench.{name}")) or not path.exists():
        return []
    earlier, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    for key in ("torch", "transformers", "threads", "smoke"):
        if earlier[key] != header[key]:
            raise typer.BadParameter(
                f"--resume: {path} was measured with {key} {earlier[key]}, and this is {header[key]}. Leave --resume "
                "out to measure all rows, or give another folder by --out."
            )
    # memory has no seconds, and a partial row had not all its turns yet
    return [row for row in rows if row["ratios"] and not row["wrong"] and not row.get("is_partial")]


def _can_resume(module: Any) -> bool:
    return hasattr(module, "rows") and "done" in inspect.signature(module.rows).parameters


def _rows(name: str, smoke: bool, done: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows of one benchmark but those named in `done`, and print each as it is measured."""
    module: Any = importlib.import_module(f"recipes.bench.{name}")
    if _can_resume(module):
        yield from module.rows(smoke, done)
        return
    if hasattr(module, "rows"):
        yield from module.rows(smoke)
        return
    for case in module.cases(smoke):
        try:
            with torch.no_grad():
                row = measure(case, module.__name__, smoke=smoke)
        except Exception as error:  # such as too little memory for one case
            row = broken(case.name, error)
        typer.echo(f"{name}: {case.name}")
        if row.get("waited", 0.0) > BUSY and not smoke:
            typer.echo(f"{name}: {case.name}: {doubt(row)}", err=True)
        for peer, reason in row["missing"].items():
            typer.echo(f"{name}: {case.name}: {peer} NOT MEASURED: {reason}", err=True)
        yield row


def report(folder: Path) -> str:
    """Return the tables of all benchmarks with results in `folder`, in Markdown."""
    sections = []
    for name in NAMES:
        if (path := folder / f"{name}.json").exists():
            header, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            tables = getattr(importlib.import_module(f"recipes.bench.{name}"), "table", table)
            sections += [f"## {name}", f"`{json.dumps(header)}`", tables(rows, smoke=header["smoke"])]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    typer.run(main)
