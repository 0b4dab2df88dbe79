"""The regions of pages that are generated when the site is built: `<!-- generated: NAME -->` in a page."""

from __future__ import annotations

from collections.abc import Callable

from generated import (
    command,
    error_list,
    explorer,
    goals,
    images,
    pictures,
    public_names,
    real_models,
    recipes,
    schemes,
    walks,
)

GENERATED: dict[str, Callable[[], str]] = {
    "api": public_names.render,
    "command": command.render,
    "errors": error_list.render,
    "explorer": explorer.render,
    "goals": goals.render,
    "images": images.render,
    "pictures": pictures.render,
    "real-models": real_models.render,
    "real-models-kept": real_models.kept,
    "recipes": recipes.render,
    "rooms": walks.rooms,
    "schemes": schemes.render,
    "traits": schemes.traits,
    "walks": walks.render,
}
"""By name, what writes the region, as Markdown."""
