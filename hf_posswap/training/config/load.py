"""Recipes from files and the command line, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import CheckpointError, ConfigError
from hf_posswap.training.config.problems import Problems
from hf_posswap.training.config.reading import override, read_yaml
from hf_posswap.training.config.scheme_texts import JSON
from hf_posswap.training.config.shipped import find_recipe
from hf_posswap.utils.atomic_io import read_json
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:  # TrainingArguments bring accelerate and PEFT along: they load where a recipe is made
    from hf_posswap.training.config.settings import Recipe


def load_recipe(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """Return a recipe of the package, the one in a YAML file, or that such a mapping says, with `overrides` put in.

    Args:
        source: the name of a recipe that comes with the package ("yarn": `posswap recipes` lists them), a file
            ("mine.yaml"), or what a file would say. `include:` in a file names others below it.
        overrides: such as "training.max_steps=100"; the values are read as YAML.

    Raises:
        UnknownNameError: no recipe of the package has that name.
        ConfigError: every problem in one message: unknown keys, wrong types, impossible combinations.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "mine.yaml"
        ...     _ = path.write_text("model: {name: gpt2}\\nswap: {scheme: rope}")
        ...     load_recipe(path, ["swap.max_length=4096"]).swap
        SwapSettings(scheme='rope', max_length=4096, site='auto', relative=None, centre=False, fit=0, gradual_steps=0)
        >>> load_recipe({"model": {"name": "gpt2"}}, ["training.max_steps=50"]).training.max_steps
        50
        >>> load_recipe("yarn", ["model.name=my-llama", "swap.scheme.factor=16"]).swap.scheme
        {'name': 'yarn', 'factor': 16}
    """
    if isinstance(source, Mapping):
        return make_recipe(override(source, overrides))
    path = find_recipe(source)
    values = override(read_yaml(path), overrides)
    return make_recipe({**values, "name": values.get("name") or path.stem}, where=str(source))


def make_recipe(values: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """Return the recipe that `values` say, as YAML would.

    Raises:
        ConfigError: as `load_recipe`.
    """
    from hf_posswap.training.config.checking import check
    from hf_posswap.training.config.peft_keys import read_peft
    from hf_posswap.training.config.settings import Recipe
    from hf_posswap.training.config.typed import read

    problems = Problems()
    recipe = read(Recipe, _with_schemes(values, problems), problems)
    recipe = dataclasses.replace(recipe, peft=read_peft(recipe.peft, problems))
    problems.take(check(recipe))
    found = problems.said
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise ConfigError(f"{where} has {count}: " + " ".join(f"({n}) {p}" for n, p in enumerate(found, 1)))
    return recipe


def _with_schemes(values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Return `values` with schemes read from the .json files that stand in their place."""
    held = dict(values)
    if isinstance(held.get("swap"), Mapping):
        held["swap"] = _with_scheme(held["swap"], "swap", problems)
    if isinstance(held.get("stages"), list):
        held["stages"] = [
            _with_scheme(stage, f"stages[{number}]", problems) if isinstance(stage, Mapping) else stage
            for number, stage in enumerate(held["stages"])
        ]
    return held


def _with_scheme(values: Mapping[str, Any], key: str, problems: Problems) -> dict[str, Any]:
    held = dict(values)
    named = held.get("scheme")
    if isinstance(named, str) and named.endswith(JSON):
        try:
            held["scheme"] = read_json(expand_home(named))
        except CheckpointError as error:
            problems.add(f"{key}.scheme", f"{error} posswap search writes such a file.")
            del held["scheme"]
    return held


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return `recipe` as JSON, from which `make_recipe` makes it again; of `training` what transformers does not do."""
    from hf_posswap.training.config.theirs import said

    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return json.loads(json.dumps(fields | {"training": said(recipe.training)}, default=_as_json))


def _as_json(value: Any) -> Any:
    held = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if held else str(value)
