"""`posswap support`: which schemes work in which model classes of the installed transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import Json
from hf_posswap.cli.listing import warnings_off
from hf_posswap.cli.output import quiet_library, show_indented, show_json, show_pairs, show_text
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
    groups: dict[tuple[tuple[str, str], ...], list[ClassEntry]] = {}
    for entry in entries:
        groups.setdefault(tuple(entry.routes.items()), []).append(entry)
    for group in groups.values():
        _show(group)
    return show_text(
        "native: stock transformers loads the saved checkpoint. plugin: loading it needs hf_posswap. no: refused; "
        "posswap explain MODEL SCHEME says why."
    )


def _show(entries: Sequence[ClassEntry]) -> None:
    """Print classes that support the same schemes, and the schemes by their route; or why each class is refused."""
    for entry in entries:
        refused = "" if entry.supported else f": {entry.reason}"
        show_indented(f"{entry.name} ({', '.join(entry.model_types)}){refused}", 0)
    by_route = {
        route: [scheme for scheme, scheme_route in entries[0].routes.items() if scheme_route == route]
        for route in ("native", "plugin", "no")
    }
    show_pairs((f"  {route}", ", ".join(schemes)) for route, schemes in by_route.items() if schemes)
    show_text("")
