"""`posswap train`: a recipe, from its file to the finished model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.cli.arguments import TrustRemoteCode
from hf_posswap.cli.fields import attribute_docs, format_value
from hf_posswap.cli.output import console, quiet_library, show_json, show_pairs, show_text
from hf_posswap.errors import ConfigError


def train(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE...]",
            help="What differs from the recipe: model.name=my-llama optimizer.steps=500. --keys lists the keys.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="RECIPE.yaml", help="The recipe.", show_default=False),
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="List every key with its meaning and default, and stop.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe as it would run, as JSON, and stop.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Adapt a model to a new position mechanism, as a recipe says; stopped anywhere, the same command goes on.

    The swap is planned, proved and measured before the first step. The folder `out` keeps checkpoints, log.jsonl,
    pictures, the report, and the finished model. On several GPUs: accelerate launch --config_file
    recipes/accelerate/ddp.yaml recipes/train.py --config RECIPE.yaml. It needs the extra "train".

    Example: posswap train --config recipes/yarn.yaml model.name=my-llama data.length=8192 out=my-run
    """
    if keys:
        show_pairs(key_rows())
        return
    if config is None:
        raise ConfigError("give a recipe: --config recipes/yarn.yaml; or --keys for what a recipe can say.")
    progress = console()  # on stdout, which the block below takes away
    with quiet_library():
        from hf_posswap.adapting import run_recipe
        from hf_posswap.training.config import load_recipe
        from hf_posswap.training.config.load import to_dict
        from hf_posswap.utils.progress import Reporter

        trusted = ["model.trust_remote_code=true"] if trust_remote_code else []
        recipe = load_recipe(config, [*(settings or ()), *trusted])
        if not show:
            finished = run_recipe(recipe, reporter=Reporter(progress))
    if show:
        show_json(to_dict(recipe))
    elif int(os.environ.get("RANK", "0")) == 0:
        show_text("", f"Saved to {finished.model}; the report is {finished.folder / 'report.md'}.")


def key_rows() -> Iterator[tuple[str, str]]:
    """Return every key of a recipe with its default, and its meaning, from where they are documented once."""
    from hf_posswap.training.config import Recipe
    from hf_posswap.training.config.keys import keys_of

    for key in keys_of(Recipe):
        yield f"{key.name}={format_value(key.default)}", attribute_docs(key.owner)[key.field]
