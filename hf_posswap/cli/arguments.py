"""Arguments that several commands share, their conversion to library objects, and their completion in a shell."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.gguf_source import gguf_path, is_gguf, on_hub
from hf_posswap.utils.untrusted import read_bounded_json
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from hf_posswap.schemes import Scheme

_SIGN = "+"


def scheme_names(incomplete: str) -> list[str]:
    """Return the schemes whose names begin with `incomplete`."""
    from hf_posswap.schemes.base import known_schemes

    sum_so_far, plus, begun = incomplete.rpartition(_SIGN)
    return [f"{sum_so_far}{plus}{name}" for name in known_schemes() if name.startswith(begun)]


def added_schemes(incomplete: str) -> list[str]:
    """Return the matching schemes in the form that `posswap compare` takes, with + before the name."""
    model, plus, begun = incomplete.partition(_SIGN)
    return [f"{model}{_SIGN}{name}" for name in scheme_names(begun)] if plus else []


def recipe_names(incomplete: str) -> list[str]:
    """Return the recipes of the package whose names begin with `incomplete`."""
    from hf_posswap.training.config.shipped import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def training_names(incomplete: str) -> list[str]:
    """Return the training recipes of the package whose names begin with `incomplete`."""
    from hf_posswap.training.config.shipped import shipped_recipes

    return [name for name, recipe in shipped_recipes().items() if recipe.trains and name.startswith(incomplete)]


def family_names(incomplete: str) -> list[str]:
    """Return the families whose names begin with `incomplete`."""
    from hf_posswap.families import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)]


class Site(StrEnum):
    """Where a scheme is inserted: see `site` in `hf_posswap.plan_swap`."""

    auto = "auto"
    attention = "attention"


class Relative(StrEnum):
    """What happens to relative positions that accompany a table: see `relative` in `hf_posswap.plan_swap`."""

    keep = "keep"
    drop = "drop"


SCHEME_HELP = (
    "The scheme to put in, alone or with fields: yarn, or yarn:factor=4,base=500000; posswap schemes lists them. Or a "
    ".json file with a scheme, as written by posswap search."
)


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder with a checkpoint, a GGUF file, or a Hub id.", show_default=False),
]


GGUFFile = Annotated[
    str | None,
    typer.Option(
        "--gguf-file",
        metavar="NAME",
        help="The GGUF file in MODEL, a folder or a Hub id, where it holds several.",
        show_default=False,
    ),
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
        help="Tokens that the swapped model should read. Default: the model's length, or that length times the factor.",
        show_default=False,
    ),
]


SiteOption = Annotated[
    Site,
    typer.Option(
        "--site",
        help="auto: in the model's config and weights if they can express the scheme, so that stock transformers loads "
        "the result. attention: always inside attention.",
    ),
]


RelativeOption = Annotated[
    Relative | None,
    typer.Option(
        "--relative",
        help="Keep or drop the relative positions that DeBERTa has inside attention in addition to its table. Default: "
        "keep. Other models have none and reject this option.",
        show_default=False,
    ),
]


TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with a model, its tokenizer or a task. Read it first.",
    ),
]


Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def make_scheme(text: str) -> Scheme:
    """Parse a scheme, "yarn" or "yarn:factor=4,base=500000", or read it from the .json file named `text`.

    Raises:
        UnknownNameError: no such scheme.
        CheckpointError: no such file, or no JSON.
        OptionError: the scheme has no such field, a value has the wrong type, or the syntax is wrong.
        SchemeError: a value is invalid.
    """
    from hf_posswap import schemes

    return schemes.make_scheme(_read_scheme_file(text) if text.endswith(".json") else text)


def _read_scheme_file(name: str) -> dict[str, object]:
    try:
        fields = read_bounded_json(expand_home(name))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shown(Path(name))} is not a readable file of a scheme: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{shown(Path(name))} holds no scheme, which is an object with a name and fields.")
    return fields


def source_of(model: str, gguf_file: str | None = None) -> str:
    """Return `model` in the form that the library accepts: the path of a folder or GGUF file, or a Hub id.

    Args:
        model: as typed.
        gguf_file: name of a GGUF file in it, or None.

    Raises:
        CheckpointError: it is another file, or a path that does not exist.
        OptionError: a file is named in a file.
    """
    path = expand_home(model)
    if model and gguf_file is not None:
        return gguf_path(str(path) if os.path.exists(path) else source_of(model), gguf_file)
    if model and os.path.isdir(path):
        return str(path)
    if model and is_gguf(path):
        return str(path)
    if model and not os.path.exists(path) and on_hub(model):
        return model
    if model and os.path.exists(path):
        raise CheckpointError(
            f"{model} is a file; give the folder that holds the model's config.json, or a GGUF file, "
            "which begins with the bytes GGUF."
        )
    if model and os.path.islink(path):
        raise CheckpointError(
            f"{model!r} is a link to {os.readlink(path)!r}, which does not exist; give a folder that holds a "
            "config.json, or a Hub id."
        )
    if not model or model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise CheckpointError(f"{model!r} does not exist; give a folder that holds a config.json, or a Hub id.")
    return model
