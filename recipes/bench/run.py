"""Runs the benchmarks: what each swap costs beside the same model without it, and beside other packages.

    python -m recipes.bench.run                       # all, on a quiet machine: about half an hour
    python -m recipes.bench.run bias merge            # some
    python -m recipes.bench.run --smoke --out small   # tiny sizes: a check that all ways agree, and a report

Writes NAME.json, one row a line, and table.md to the folder. It ends with 1 where two ways of computing the same thing
differ; a goal that is missed is said in the table and fails nothing.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from recipes.bench.harness import machine, measure, table

NAMES = ("roof", "rope", "bias", "merge", "ppl", "train", "patch", "decode", "load")


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(NAMES)}; none: all.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes, one repetition.")] = False,
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path(__file__).parent / "results",
) -> None:
    """Measure and write down."""
    unknown = sorted(set(names or ()) - set(NAMES))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(NAMES)}.")
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    about = machine()
    text, wrong = [f"`{json.dumps(about)}`"], []
    for name in names or NAMES:
        module = f"recipes.bench.{name}"
        rows = []
        for case in importlib.import_module(module).cases(smoke):
            with torch.no_grad():
                rows.append(measure(case, module, smoke=smoke))
            typer.echo(f"{name}: {rows[-1]['name']}")
        lines = [json.dumps(about), *map(json.dumps, rows)]
        (out / f"{name}.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
        text += [f"## {name}", table(rows, smoke=smoke)]
        wrong += [f"{name}: {row['name']}: {problem}" for row in rows for problem in row["wrong"]]
    (out / "table.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    typer.echo("\n\n".join(text))
    if wrong:
        typer.echo("\n".join(["not the same numbers:", *wrong]), err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
