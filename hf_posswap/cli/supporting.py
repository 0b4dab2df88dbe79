"""`posswap support`: which schemes work in which model classes of the installed transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import Json
from hf_posswap.cli.listing import warnings_off
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_text
from hf_posswap.errors import OptionError, UnknownNameError

if TYPE_CHECKING:
    from hf_posswap.patching.inspect.census import ClassEntry

_MOST = 40
"""Most classes to plan: each takes about a second."""


def support(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Part of the name of a class, a model type or a family: qwen3, BertForMaskedLM, rotary.",
            show_default=False,
        ),
    ],
    json: Json = False,
) -> None:
    """Find the schemes that work in a model class of the installed transformers: natively, by plugin, or not at all.

    A tiny model of each class whose name, model type or family contains NAME is built, and a swap to every scheme is
    planned for it. Nothing is downloaded. For a checkpoint, posswap explain MODEL says the same from its config.

    Example: posswap support qwen3
    """
    with quiet_library(), warnings_off():
        from hf_posswap.patching.inspect.census import census, classes_named, known_names

        matching = classes_named(name)
        if not matching:
            raise UnknownNameError("model class, model type or family", name, known_names())
        if len(matching) > _MOST:
            raise OptionError(
                f"{name!r} is part of {len(matching)} classes, such as {', '.join(matching[:3])}: give a longer name. "
                "posswap families --classes lists all."
            )
        entries = census(matching, every_scheme=True)
    if json:
        return show_json([entry.to_dict() for entry in entries])
    for entry in entries:
        _show(entry)
    return show_text(
        "native: stock transformers loads the saved checkpoint. plugin: loading it needs hf_posswap. no: refused."
    )


def _show(entry: ClassEntry) -> None:
    types = ", ".join(entry.model_types)
    rows = [(entry.name, f"{types}; {entry.native or 'positions unknown'}")]
    for route in ("native", "plugin"):
        schemes = [scheme for scheme, own in entry.routes.items() if own == route]
        rows += [(f"  {route}", ", ".join(schemes))] if schemes else []
    refused = [scheme for scheme, own in entry.routes.items() if own == "no"]
    if refused or entry.reason:
        reason = f": {entry.reason}" if entry.reason else ""
        rows.append(("  no", f"{', '.join(refused) or 'scheme'}{reason}"))
    show_pairs(rows)
    show_text("")
