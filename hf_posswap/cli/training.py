"""`posswap train`: a recipe, from its file to the finished model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.fields import attribute_docs, format_value
from hf_posswap.cli.output import console, quiet_library, show_json, show_pairs, show_text
from hf_posswap.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np

    from hf_posswap.training.engine import Services


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
        from hf_posswap.training.config import load_recipe
        from hf_posswap.training.config.load import to_dict

        recipe = load_recipe(config.expanduser(), settings or ())
        if not show:
            from hf_posswap.training.engine import run_recipe

            finished = run_recipe(recipe, services(progress))
    if show:
        show_json(to_dict(recipe))
    elif int(os.environ.get("RANK", "0")) == 0:
        show_text("", f"Saved to {finished.model}; the report is {finished.folder / 'report.md'}.")


def services(progress: Any) -> Services:
    """Return what the engine is given: evaluation, free memory, and a reporter on the console `progress`."""
    from hf_posswap.evaluation.memory import available_bytes
    from hf_posswap.progress import Reporter
    from hf_posswap.training.engine import Services

    return Services(evaluate=nll_at_lengths, free_bytes=available_bytes, reporter=Reporter(progress))


def nll_at_lengths(model: Any, documents: Sequence[np.ndarray], lengths: Sequence[int], limit: int) -> dict[int, float]:
    """Return the mean loss a token of whole held-out documents at each length that the model can run.

    Args:
        model: a causal model, or a PEFT model around one.
        documents: token ids of each.
        lengths: tokens to read of each document.
        limit: most documents to read.

    Raises:
        DataError: no document is as long as the longest length.
    """
    import numpy as np

    from hf_posswap.evaluation import measure_losses
    from hf_posswap.evaluation.reach import reach_of
    from hf_posswap.patching.plan import unwrap

    target = unwrap(model)
    reach = reach_of(target)
    runs = [length for length in lengths if reach.limit is None or length <= reach.limit]
    long = [document[: max(lengths)] for document in documents if len(document) >= max(lengths)][:limit]
    if not long:
        longest = max(map(len, documents), default=0)
        raise DataError(
            f"no held-out document has {max(lengths)} tokens (the longest has {longest}): give longer documents, or "
            "shorter watch.evaluate_lengths."
        )
    if not runs:
        return {}
    training = model.training
    model.eval()
    try:
        losses = measure_losses(target, np.stack(long), runs, one_pass=reach.prefix_consistent)
    finally:
        model.train(training)
    return {length: float(found.mean(dtype=np.float64)) for length, found in losses.items()}


def key_rows() -> Iterator[tuple[str, str]]:
    """Return every key of a recipe with its default, and its meaning, from where they are documented once."""
    from hf_posswap.training.config import Recipe
    from hf_posswap.training.config.keys import keys_of

    for key in keys_of(Recipe):
        yield f"{key.name}={format_value(key.default)}", attribute_docs(key.owner)[key.field]
