"""Measures a model before and after a swap, without training: the Python form of `posswap eval`.

    python recipes/evaluate.py gpt2 rope results --text python
    python recipes/evaluate.py gpt2 rope results --text books/ --lengths 512,1024,2048
    accelerate launch --multi_gpu recipes/evaluate.py gpt2 rope results --text books/  # documents are shared

The folder keeps results.json, tables, plots and every finished unit: the same command resumes an interrupted run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import hf_posswap
from hf_posswap.cli.arguments import TrustRemoteCode
from hf_posswap.cli.evaluating import requested_text
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import is_main_process


def main(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id.")],
    scheme: Annotated[str, typer.Argument(help="What to put in: see posswap schemes.")],
    out: Annotated[Path, typer.Argument(help="The folder for results.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Files, folders, Hub data sets; python: the text of this Python installation."),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="In tokens, with commas; 1, 2, 4, 8 windows otherwise.")] = None,
    documents: Annotated[int, typer.Option(help="Largest number of documents to measure on.")] = 48,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure MODEL as it is and with SCHEME put in, on the same tokens, and print the table."""
    chosen = None if lengths is None else tuple(int(length) for length in lengths.split(","))
    settings = hf_posswap.EvalSettings(lengths=chosen, documents=documents)
    results = hf_posswap.evaluate(
        model, scheme, documents=requested_text(text), out=out, settings=settings, trust_remote_code=trust_remote_code
    )
    if not is_main_process():
        return
    typer.echo(str(results))
    short = results.results["models"][list(results.results["models"])[-1]].get("short_reg")
    if short is not None:
        typer.echo(f"Within the window: {short['loss']['verdict']}, KL {short['divergence']:.4f} nats per token.")


app = script(main)

if __name__ == "__main__":
    app()
