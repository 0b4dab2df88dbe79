"""`posswap recipes`: the training recipes that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import Json, recipe_names
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_table, show_text
from hf_posswap.errors import OptionError
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from hf_posswap.training.config.shipped import ShippedRecipe


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Print this recipe's file.", show_default=False, autocompletion=recipe_names
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE_OR_DIR", help="With --copy: the destination. Default: the working folder.", show_default=False
        ),
    ] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the recipe and its includes for editing; no file is replaced.")
    ] = False,
    json: Json = False,
) -> None:
    """List the recipes that come with the package, print one, or copy one.

    posswap train NAME runs a recipe; override its keys with KEY=VALUE after the name. To change more, copy it, or write
    a file that begins with include: NAME. Files named accelerate/... are for accelerate launch --config_file.

    Example: posswap recipes yarn --copy mine.yaml
    """
    if copy and name is None:
        raise OptionError("--copy: name the recipe to copy; posswap recipes lists them.")
    if target is not None and not copy:
        raise OptionError(f"{target} is a destination for --copy: give --copy too.")
    with quiet_library():
        from hf_posswap.training.config.reading import copy_recipe
        from hf_posswap.training.config.shipped import shipped_recipe, shipped_recipes

        copied = copy_recipe(name, expand_home(target or Path())) if copy and name else []
        listed = shipped_recipes() if name is None else {name: shipped_recipe(name)}
    if json:
        records = [_as_json(recipe) for recipe in listed.values()]
        show_json({"written": [str(path) for path in copied]} if copy else records if name is None else records[0])
    elif copy:
        first, *included = map(str, copied)
        show_text(f"{first} is yours to change" + (f"; it includes {', '.join(included)}." if included else "."))
        if name and listed[name].trains:
            show_text(f"Run it with: posswap train {first}")
    elif name is not None:
        typer.echo(listed[name].text.rstrip())
    else:
        rows = [(name, *recipe.swap) for name, recipe in listed.items() if recipe.trains]
        show_table(["recipe", "from", "to", "tokens", "loads with"], rows)
        show_text("", "stock: stock transformers loads the result. plugin: it needs hf_posswap, or trust_remote_code.")
        show_text("tokens: of the recipe's steps with one process; training.max_steps changes them.", "")
        show_pairs((name, r.header["Purpose"]) for name, r in listed.items() if not r.trains)
        show_text("", "posswap recipes NAME prints one: its purpose, source, command, cost and expected result.")
        show_text("posswap recipes NAME --copy copies it for editing; posswap train --keys lists what can be set.")
        show_text("posswap train NAME model.name=MODEL --text books runs it.")


def _as_json(recipe: ShippedRecipe) -> dict[str, object]:
    header: dict[str, object] = {key.lower(): text for key, text in recipe.header.items()}
    if recipe.trains:
        old, new, tokens, loads_with = recipe.swap
        header["swap"] = {"from": old, "to": new, "tokens": tokens, "loads_with": loads_with}
    return {"name": recipe.name, "trains": recipe.trains, **header, "file": str(recipe.path), "text": recipe.text}
