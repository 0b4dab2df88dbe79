"""Arguments that several commands share, documented once; and what they mean to the library."""

from __future__ import annotations

import difflib
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.fields import describe_type, field_kinds, parse_value
from hf_posswap.errors import CheckpointError, OptionError

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


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder with a checkpoint, or a Hub id.", show_default=False)
]
SchemeName = Annotated[
    str,
    typer.Argument(
        metavar="SCHEME",
        help="The scheme to put in: see posswap schemes. Or a .json file that holds one, as posswap search writes it.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a field of the scheme, as often as needed: --set factor=4 --set layout=interleaved. "
        "Lists have commas: --set long_factor=1,2,3. posswap schemes NAME lists the fields.",
        show_default=False,
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


def make_scheme(name: str, settings: list[str] | None) -> Scheme:
    """Return the scheme called `name` with the fields that --set gave, or the one that the file `name`.json holds.

    Raises:
        UnknownNameError: no such scheme.
        CheckpointError: no such file, or no JSON.
        OptionError: a setting is not FIELD=VALUE, names no field or one twice, or its value is of another type.
        SchemeError: a value is impossible.
    """
    from hf_posswap import schemes

    if name.endswith(".json"):
        if settings:
            raise OptionError(f"--set cannot change a scheme's file; change {name} itself, or give the scheme by name.")
        return schemes.make_scheme(_held(name))
    plain, colon, fields = name.partition(":")
    if colon and plain in schemes.SCHEMES:
        how = " ".join(f"--set {field}" for field in fields.split(":"))
        raise OptionError(f"{name}: fields of a scheme are given as {plain} {how}; only posswap compare takes them so.")
    kinds = field_kinds(schemes.scheme_class(name))
    values: dict[str, Any] = {}
    for setting in settings or []:
        field, equals, text = setting.partition("=")
        if not equals:
            raise OptionError(f"--set {setting}: expected FIELD=VALUE, for example --set factor=4.")
        if field not in kinds:
            raise OptionError(f"--set {setting}: scheme {name!r} has no field {field!r}.{_hint(field, kinds)}")
        if field in values:
            raise OptionError(f"--set {setting}: {field} was set before; give each field once.")
        try:
            values[field] = parse_value(text, kinds[field])
        except ValueError:
            expected = describe_type(kinds[field])
            raise OptionError(f"--set {setting}: {field} of {name!r} must be {expected}, got {text!r}.") from None
    return schemes.make_scheme(name, **values)


def _held(name: str) -> dict[str, Any]:
    try:
        held = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} is no readable file of a scheme: {error}") from error
    if not isinstance(held, dict):
        raise CheckpointError(f"{name} holds no scheme, which is an object with a name and fields.")
    return held


def _hint(field: str, kinds: dict[str, Any]) -> str:
    if field in ("max_length", "site", "relative"):
        return f" Give it as --{field.replace('_', '-')}."
    near = difflib.get_close_matches(field, kinds, n=1)
    did_you_mean = f" Did you mean {near[0]!r}?" if near else ""
    return f"{did_you_mean} It has: {', '.join(kinds) or 'none'}."


def source_of(model: str) -> str:
    """Return `model` as transformers takes it: the path of a folder, or a Hub id.

    Raises:
        CheckpointError: it is a file, or looks like a path and nothing is there.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return str(path)
    if model and path.exists():
        raise CheckpointError(f"{model} is a file; give the folder that holds the model's config.json.")
    if not model or model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise CheckpointError(f"{model!r} does not exist; give a folder that holds a config.json, or a Hub id.")
    return model
