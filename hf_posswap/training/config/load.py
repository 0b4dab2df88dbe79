"""Recipes from files and the command line, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError, ConfigError
from hf_posswap.files import read_json
from hf_posswap.training.config.building import build
from hf_posswap.training.config.checking import check
from hf_posswap.training.config.reading import override, read_yaml
from hf_posswap.training.config.settings import Recipe


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe in the YAML file `path`, with `overrides` such as "optimizer.steps=100".

    Raises:
        ConfigError: every problem in one message: unknown keys, wrong types, impossible combinations.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "mine.yaml"
        ...     _ = path.write_text("model: {name: gpt2}\\nswap: {scheme: rope}")
        ...     load_recipe(path, ["swap.max_length=4096"]).swap
        SwapSettings(scheme='rope', max_length=4096, site='auto', gradual_steps=0)
    """
    return make_recipe(override(read_yaml(path), overrides), where=str(path))


def make_recipe(values: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """Return the recipe that `values` say, as YAML would.

    Raises:
        ConfigError: as `load_recipe`.
    """
    problems: list[str] = []
    recipe = build(Recipe, _with_schemes(values), "", problems)
    if recipe is not None:
        problems = check(recipe)
    if recipe is None or problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{where} has {count}: " + " ".join(f"({n}) {p}" for n, p in enumerate(problems, 1)))
    return recipe


def _with_schemes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with schemes read from the .json files that stand in their place."""
    held = dict(values)
    if isinstance(held.get("swap"), Mapping):
        held["swap"] = _with_scheme(held["swap"])
    if isinstance(held.get("stages"), list):
        held["stages"] = [_with_scheme(stage) if isinstance(stage, Mapping) else stage for stage in held["stages"]]
    return held


def _with_scheme(values: Mapping[str, Any]) -> dict[str, Any]:
    named = values.get("scheme")
    if not (isinstance(named, str) and named.endswith(".json")):
        return dict(values)
    try:
        return dict(values) | {"scheme": read_json(Path(named).expanduser())}
    except CheckpointError as error:
        raise ConfigError(f"swap.scheme: {error} posswap search writes such a file.") from error


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return `recipe` as JSON, from which `make_recipe` makes it again."""
    return json.loads(json.dumps(dataclasses.asdict(recipe), default=str))
