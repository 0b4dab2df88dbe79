"""Pretrains a small model on any text: the bases of tests and studies.

    python recipes/pretrain.py gpt2 my-gpt2                               # learned positions, on Python's own text
    python recipes/pretrain.py llama my-llama --text books/ --tokens 14000000 --window 512
    python recipes/pretrain.py bert my-bert --text deepmind/pg19 --documents 2000
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/pretrain.py gpt2 my-gpt2

The folder keeps `start` (random weights and the tokenizer), checkpoints, the log, the report and the finished `model`.
The same command resumes after an interruption, even by SIGKILL, and ends with the same weights.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.outcome import script
from hf_posswap.errors import CheckpointError

if TYPE_CHECKING:
    from hf_posswap.training.config import Recipe
    from hf_posswap.training.fresh import FreshSettings

_SETTINGS = "pretrain.json"
_WARMUP_SHARE = 0.05
_SCHEDULE: dict[str, Any] = {
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "adam_beta2": 0.95,
}
_PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def main(
    kind: Annotated[str, typer.Argument(help="gpt2 (learned positions), llama (RoPE) or bert (masked).")],
    out: Annotated[Path, typer.Argument(help="The folder of the run; the finished model is in its folder model.")],
    text: Annotated[
        list[str] | None, typer.Option(help="Files, folders, Hub data sets; Python's own otherwise.")
    ] = None,
    column: Annotated[str, typer.Option(help="That holds the text of a row.")] = "text",
    documents: Annotated[int | None, typer.Option(help="Largest number of documents of each text.")] = None,
    tokens: Annotated[int, typer.Option(help="To train on, in all.")] = 4_000_000,
    window: Annotated[int, typer.Option(help="Positions.")] = 256,
    layers: Annotated[int, typer.Option(help="Of attention and MLP.")] = 4,
    width: Annotated[int, typer.Option(help="Of the hidden states.")] = 256,
    heads: Annotated[int, typer.Option(help="Of each attention.")] = 4,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the tokenizer; 0: bytes.")] = 2048,
    batch: Annotated[int, typer.Option(help="Windows a step, on each process.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of weights, order and masking.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of a recipe, as posswap train's.")
    ] = None,
) -> None:
    """Create a small model, train it from scratch, and print the cost."""
    from hf_posswap.cli.output import console
    from hf_posswap.training.adapting import run_recipe
    from hf_posswap.training.config import load_recipe
    from hf_posswap.training.fresh import FreshSettings
    from hf_posswap.utils.progress import Reporter

    shape = FreshSettings(kind, window, layers, width, heads, vocabulary, seed)  # type: ignore[arg-type]
    sources = [{"path": path, "column": column, "documents": documents} for path in text or ["python"]]
    steps = max(1, tokens // (batch * window * _PROCESSES))
    training = {"max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": learning_rate}
    training |= {"warmup_steps": round(_WARMUP_SHARE * steps), "weight_decay": 0.1, "seed": seed}
    values: dict[str, Any] = {
        "model": {"name": str(out / "start")},
        "data": {"sources": sources, "length": window, "packing": "documents", "seed": seed},
        "objective": {"kind": "masked" if kind == "bert" else "next-token"},
        "training": _SCHEDULE | training,
        "out": str(out),
    }
    recipe = load_recipe(values, settings or ())
    size = _start(shape, recipe, out / "start")
    training_settings = recipe.training
    trained = (
        training_settings.per_device_train_batch_size
        * training_settings.gradient_accumulation_steps
        * recipe.data.length
        * _PROCESSES
    )
    trained *= training_settings.max_steps
    main_process = int(os.environ.get("RANK", "0")) == 0
    if main_process:
        typer.echo(
            f"{kind}: {size / 1e6:.2f} M parameters, {trained / 1e6:.2f} M tokens in {training_settings.max_steps} "
            f"steps, about {6 * size * trained:.1e} floating point operations"
        )
    started = time.monotonic()
    finished = run_recipe(recipe, reporter=Reporter(console()))
    if main_process:
        typer.echo(f"{time.monotonic() - started:.0f} s in this run; the model is in {finished.model}")


def _start(shape: FreshSettings, recipe: Recipe, folder: Path) -> int:
    """Write random weights and a tokenizer to `folder`, unless they are there; return the number of parameters.

    Raises:
        CheckpointError: the folder belongs to another pretraining.
    """
    from filelock import FileLock

    import hf_posswap
    from hf_posswap.training.fresh import fresh_model, fresh_tokenizer
    from hf_posswap.utils.atomic_io import read_json, write_json

    sources = [dataclasses.asdict(source) for source in recipe.data.sources]
    settings: dict[str, Any] = {"model": dataclasses.asdict(shape), "sources": sources}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # only one of several processes creates it
        saved_settings = read_json(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else None
        if saved_settings is None:
            tokenizer = fresh_tokenizer(shape, _texts(recipe))
            model = fresh_model(shape, tokenizer)
            hf_posswap.save(model, folder, tokenizer=tokenizer, overwrite=True)
            saved_settings = settings | {"parameters": model.num_parameters()}
            write_json(folder / _SETTINGS, saved_settings)  # written last, so that it marks a complete folder
    if any(saved_settings.get(name) != value for name, value in settings.items()):
        raise CheckpointError(f"{folder.parent} holds another pretraining, of {saved_settings}: choose another folder.")
    return int(saved_settings["parameters"])


def _texts(recipe: Recipe) -> Iterator[str]:
    from hf_posswap.training.data.sources import source_documents

    for source in recipe.data.sources:
        yield from (document.text for document, held_out in source_documents(source) if not held_out)


app = script(main)

if __name__ == "__main__":
    app()
