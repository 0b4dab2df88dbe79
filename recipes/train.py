"""Adapt a model to a new position mechanism: the Python way of `posswap train`, and what launchers start.

    python recipes/train.py --config recipes/yarn.yaml model.name=my-llama out=my-run
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train.py --config recipes/yarn.yaml ...
    torchrun --nproc_per_node 8 recipes/train.py --config recipes/yarn.yaml ...

The same command goes on after a stop, even by SIGKILL, and ends with the same weights.
"""

from __future__ import annotations

import os
import sys

import typer

from hf_posswap.cli.training import train
from hf_posswap.errors import PosswapError


def main() -> None:
    """Run the recipe of the command line; an error is one line, on the main process."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train)
    try:
        app(standalone_mode=False)
    except PosswapError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
