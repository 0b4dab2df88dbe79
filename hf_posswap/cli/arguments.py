"""Arguments that several commands share, documented once; and what they mean to the library."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.completing import scheme_names
from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.untrusted import read_bounded_json
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from hf_posswap.schemes import Scheme


class Site(StrEnum):
    """Where a scheme is put: `hf_posswap.plan_swap`."""

    auto = "auto"
    attention = "attention"


class Relative(StrEnum):
    """What becomes of relative positions beside a table: `hf_posswap.plan_swap`."""

    keep = "keep"
    drop = "drop"


SCHEME_HELP = (
    "The scheme to put in, alone or with fields: yarn, or yarn:factor=4,base=500000; posswap schemes lists them. Or a "
    ".json file that holds one, as posswap search writes it."
)
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder with a checkpoint, or a Hub id.", show_default=False)
]
SchemeName = Annotated[
    str,
    typer.Argument(
        metavar="SCHEME",
        help=SCHEME_HELP,
        show_default=False,
        autocompletion=scheme_names,
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        metavar="N",
        help="Tokens that the swapped model is meant for; without it the model's own length, or what a factor reaches.",
        show_default=False,
    ),
]
SiteOption = Annotated[
    Site,
    typer.Option(
        "--site",
        help="auto: in the model's own config and weights where they can say it, so that stock transformers loads the "
        "result. attention: always inside attention.",
    ),
]
RelativeOption = Annotated[
    Relative | None,
    typer.Option(
        "--relative",
        help="Keep or drop the relative positions that DeBERTa has inside attention beside its table; without it they "
        "are kept. Other models have none, and take neither.",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that a model, its tokenizer or a task brings, where it needs that. Read it first.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def make_scheme(text: str) -> Scheme:
    """Return the scheme that `text` writes, "yarn" or "yarn:factor=4,base=500000", or that the file `text` holds.

    Raises:
        UnknownNameError: no such scheme.
        CheckpointError: no such file, or no JSON.
        OptionError: it has no such field, a value is of another type, or it is written in another way.
        SchemeError: a value is impossible.
    """
    from hf_posswap import schemes

    return schemes.make_scheme(_held(text) if text.endswith(".json") else text)


def _held(name: str) -> dict[str, Any]:
    try:
        held = read_bounded_json(expand_home(name))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shown(Path(name))} is no readable file of a scheme: {error}") from error
    if not isinstance(held, dict):
        raise CheckpointError(f"{shown(Path(name))} holds no scheme, which is an object with a name and fields.")
    return held


def source_of(model: str) -> str:
    """Return `model` as transformers takes it: the path of a folder, or a Hub id.

    Raises:
        CheckpointError: it is a file, or looks like a path and nothing is there.
    """
    path = expand_home(model)
    if model and path.is_dir():
        return str(path)
    if model and path.exists():
        raise CheckpointError(f"{model} is a file; give the folder that holds the model's config.json.")
    if not model or model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise CheckpointError(f"{model!r} does not exist; give a folder that holds a config.json, or a Hub id.")
    return model
