"""`posswap train`: runs a recipe, from its file to the finished model, or says what it would take (`--dry-run`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from json import dumps as dump_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import TrustRemoteCode, training_names
from hf_posswap.cli.evaluating import progress as progress_on_stderr
from hf_posswap.cli.listing import format_value
from hf_posswap.cli.outcome import Code, was_interrupted
from hf_posswap.cli.output import console, quiet_library, show_json, show_pairs, show_text
from hf_posswap.errors import ConfigError
from hf_posswap.utils.printable import printable
from hf_posswap.utils.scheme_text import attribute_docs

if TYPE_CHECKING:
    from hf_posswap.training.config import Recipe
    from hf_posswap.training.dryrun import DryRun
    from hf_posswap.training.dryrun.prediction import Prediction
    from hf_posswap.utils.progress import Reporter

_SETTING = re.compile(r"[\w.\[\]]*=")
"""The start of KEY=VALUE; a file may have = in its path, but after a slash."""
_DOCS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"


def train(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE...]",
            help="A recipe of the package by name (posswap recipes lists them) or a file, and what differs from it: "
            "model.name=my-llama training.max_steps=500. --keys lists the keys.",
            show_default=False,
            autocompletion=training_names,
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="PATH_OR_ID",
            help="Text to train on, as data.sources.0.path: files, folders of them, .jsonl or .parquet, a folder of "
            "Dataset.save_to_disk, or a data set on the Hub. Repeatable. python: the sources and documentation of this "
            "Python installation.",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The text column of the rows of --text, as data.sources.0.column. Default: text.",
            show_default=False,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length",
            metavar="N",
            help="Tokens that the swapped model should read, as swap.max_length.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="RECIPE", hidden=True),
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="List every key with its meaning and default, and stop.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe as it would run, as JSON, and stop.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Predict memory, steps and time on each GPU, and stop. It reads only config.json: no weights, text or "
            "GPU are needed.",
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="h100|a100|4090|MEMORY",
            help="With --dry-run: whether it fits this GPU, its least time, and what makes it fit. MEMORY: 24GB.",
            show_default=False,
        ),
    ] = None,
    accelerate: Annotated[
        str | None,
        typer.Option(
            "--accelerate",
            metavar="FILE",
            help="With --dry-run: the config file of accelerate launch, or fsdp2, ddp, ... of the package.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="N",
            max=65_536,
            help="With --dry-run: the number of GPUs. Default: that of FILE, or one.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: print it as JSON.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Adapt a model to a new position mechanism with a recipe; after a stop, the same command resumes.

    The swap is planned, proved and measured before the first step. The folder `out` keeps checkpoints, log.jsonl,
    pictures, the report, and the finished model. On several GPUs: posswap recipes accelerate/ddp --copy, then
    accelerate launch --config_file ddp.yaml -m hf_posswap train RECIPE ... It needs the extra "train".

    Example: posswap train yarn model.name=my-llama --text books/ data.length=8192 out=my-run

    Example: posswap train yarn model.name=my-llama data.length=8192 --dry-run --gpu h100 --accelerate fsdp2
    """
    if keys:
        show_pairs(key_rows())
        return
    if not dry_run and (json or any(given is not None for given in (gpu, accelerate, processes))):
        raise ConfigError("--gpu, --accelerate, --processes and --json need --dry-run: give it too.")
    if dry_run and show:
        raise ConfigError("--show and --dry-run exclude each other: give one of them.")
    chosen, changes = _recipe_and_changes(config, settings or [])
    changes += _as_settings(changes, text or [], column, max_length)
    progress = console()  # on stdout, which the block below redirects
    with quiet_library():
        from hf_posswap.training.adapting import run_recipe
        from hf_posswap.training.config import load_recipe
        from hf_posswap.training.config.load import to_dict
        from hf_posswap.utils.progress import Reporter

        trusted = ["model.trust_remote_code=true"] if trust_remote_code else []
        recipe = load_recipe(chosen, [*changes, *trusted])
        if dry_run:
            reporter = None if json else progress_on_stderr()
            report = run_dry(recipe, reporter, gpu=gpu, accelerate=accelerate, processes=processes)
        elif not show:
            with _telling_what_is_saved(recipe):
                finished = run_recipe(recipe, reporter=Reporter(progress))
    if dry_run:
        show_dry_run(report, json=json)
    elif show:
        show_json(to_dict(recipe))
    elif int(os.environ.get("RANK", "0")) == 0:
        show_text("", f"Saved to {finished.model}; the report is {finished.folder / 'report.md'}.")


def _as_settings(settings: list[str], text: list[str], column: str | None, max_length: int | None) -> list[str]:
    """Return --text, --column and --max-length as the KEY=VALUE that they stand for.

    Raises:
        ConfigError: one of them is given both ways, or --column without --text.
    """
    for option, key, is_given in (
        ("--text", "data.sources", bool(text)),
        ("--max-length", "swap.max_length", max_length is not None),
    ):
        doubled = [setting for setting in settings if is_given and re.match(rf"{re.escape(key)}\b", setting)]
        if doubled:
            raise ConfigError(f"{option} sets {key}, and so does {doubled[0]!r}: give one of them.")
    if column is not None and not text:
        raise ConfigError(
            f"--column {column} is the column of --text: give --text too, or data.sources.0.column={column}."
        )
    columns = {} if column is None else {"column": column}
    given = [f"data.sources={dump_json([{'path': path, **columns} for path in text])}"] if text else []
    return [*given, *([f"swap.max_length={max_length}"] if max_length is not None else [])]


@contextmanager
def _telling_what_is_saved(recipe: Recipe) -> Iterator[None]:
    """After Ctrl-C inside the block, print on stderr what is saved and how it resumes, on the main process."""
    try:
        yield
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt) or was_interrupted()
        if interrupted and os.environ.get("RANK", "0") == "0":
            from hf_posswap.training.engine.run import resume_note

            typer.echo(printable(resume_note(recipe)), err=True)
        raise


def _recipe_and_changes(config: Path | None, arguments: list[str]) -> tuple[str | Path, list[str]]:
    """Return the recipe, by name or path, and the settings: the first argument is the recipe unless it is a setting.

    Raises:
        ConfigError: no recipe, or two.
    """
    named = arguments[0] if arguments and not _SETTING.match(arguments[0]) else None
    if config is not None and named is not None:
        raise ConfigError(f"two recipes: --config {config}, and {named!r}, which is not KEY=VALUE. Give one of them.")
    if config is None and named is None:
        raise ConfigError(
            "give a recipe first: posswap train yarn, or a file; posswap recipes lists the names, --keys what a recipe "
            "can say."
        )
    return (config, arguments) if config is not None else (str(named), arguments[1:])


def key_rows() -> Iterator[tuple[str, str]]:
    """Yield every key of a recipe with its default and its meaning, from the dataclasses that document them."""
    from hf_posswap.training.config import Recipe
    from hf_posswap.training.config.settings import keys_of
    from hf_posswap.training.config.theirs import OWN, REFUSED, THEIRS

    for key in keys_of(Recipe):
        if key.name != "training":
            yield f"{key.name}={format_value(key.default)}", attribute_docs(key.owner)[key.field]
            continue
        yield "training.*", f"All fields of transformers.TrainingArguments, with its defaults, but these: {_DOCS}"
        for name, default in OWN.items():
            note = "on a GPU adamw_torch_fused, elsewhere adamw_torch" if name == "optim" else "a default of hf_posswap"
            yield f"training.{name}={format_value(default)}", f"{note}; transformers has {format_value(THEIRS[name])}"
        for name, (used, why) in REFUSED.items():
            if name in THEIRS:
                yield f"training.{name}", f"fixed{'' if used is None else f' at {format_value(used)}'}: {why}"


def run_dry(
    recipe: Recipe, reporter: Reporter | None, *, gpu: str | None, accelerate: str | None, processes: int | None
) -> DryRun:
    """Predict the memory, steps and time of the training that `recipe` describes.

    Args:
        recipe: the training.
        reporter: prints progress; None: prints nothing.
        gpu: name or memory of a GPU.
        accelerate: an accelerate config file, or the name of one in the package.
        processes: the number of GPUs.

    Raises:
        UnknownNameError, OptionError: no such GPU, or no such file.
        PosswapError: as `dry_run`, or the model does not support the fitted start of `recipe`.
    """
    from hf_posswap.training.adapting import check_fitted_start
    from hf_posswap.training.dryrun import dry_run

    check_fitted_start(recipe)
    return dry_run(
        recipe,
        gpu=gpu,
        accelerate=accelerate,
        processes=processes,
        say=None if reporter is None else reporter.line,
    )


def show_dry_run(report: DryRun, *, json: bool) -> None:
    """Print a dry run as tables or as JSON; if the training does not fit, exit with `Code.UNSUPPORTED`."""
    if json:
        show_json(report.to_dict())
    else:
        for prediction in report.predictions:
            if prediction.phase:
                show_text(prediction.phase)
            show_pairs(prediction.rows())
        show_text(*report.said)
        _show_total(report.predictions)
        if report.change is not None:
            show_text("", f"The smallest change that makes it fit: {report.change.said}")
            for prediction in report.changed:
                show_pairs(prediction.rows())
            _show_total(report.changed)
        elif report.fits is False:
            show_text("", "No change that is known here makes it fit: take a shorter data.length, or a larger GPU.")
    if report.fits is False:
        raise typer.Exit(Code.UNSUPPORTED)


def _show_total(predictions: Sequence[Prediction]) -> None:
    from hf_posswap.training.dryrun.prediction import total_row

    show_text("")
    show_pairs([total_row(predictions)])
