"""Compares schemes on one model without training: which one extrapolates best? The Python form of `posswap compare`.

    python recipes/compare.py meta-llama/Llama-3.2-1B results yarn ntk self_extend --text books/ --lengths 8192,16384
    python recipes/compare.py gpt2 results rope alibi --text python
    accelerate launch --multi_gpu recipes/compare.py gpt2 results rope alibi --text books/  # documents are shared
    torchrun --nproc_per_node 4 recipes/compare.py gpt2 results rope alibi --text books/    # the same, on CPUs too

The weights are loaded once and shared by all candidates. The folder keeps every finished unit: the same command resumes
an interrupted run, and another scheme costs only its own measurement.
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
    out: Annotated[Path, typer.Argument(help="The folder for results.")],
    schemes: Annotated[list[str], typer.Argument(help="What to put in, one after the other.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Files, folders, Hub data sets; python: the text of this Python installation."),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="In tokens, with commas; 1, 2, 4, 8 windows otherwise.")] = None,
    documents: Annotated[int, typer.Option(help="Largest number of documents to measure on.")] = 48,
    metrics: Annotated[str, typer.Option(help="With commas: hf_posswap.comparison.METRICS.")] = "ppl_prefix,short_reg",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure MODEL as it is and with each of SCHEMES put in, on the same tokens, and print the table."""
    chosen = None if lengths is None else tuple(int(length) for length in lengths.split(","))
    candidates = [hf_posswap.Candidate(model), *(hf_posswap.Candidate(model, scheme) for scheme in schemes)]
    settings = hf_posswap.EvalSettings(chosen, tuple(metrics.split(",")), documents)
    results = hf_posswap.compare(
        candidates, documents=requested_text(text), out=out, settings=settings, trust_remote_code=trust_remote_code
    )
    if is_main_process():
        typer.echo(str(results))


app = script(main)

if __name__ == "__main__":
    app()
