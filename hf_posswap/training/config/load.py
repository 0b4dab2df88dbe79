"""Loads recipes from files and the command line, and refuses them if anything is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import CheckpointError, ConfigError, OptionError
from hf_posswap.training.config.reading import JSON, override, read_yaml
from hf_posswap.training.config.shipped import find_recipe
from hf_posswap.training.config.typed import Problems
from hf_posswap.utils.atomic_io import read_json
from hf_posswap.utils.printable import brief_repr
from hf_posswap.utils.user_paths import expand_home, import_module

if TYPE_CHECKING:  # TrainingArguments imports accelerate and PEFT: deferred until a recipe is built
    from hf_posswap.training.config.settings import Recipe


def load_recipe(source: str | Path | Mapping[str, object], overrides: Iterable[str] = ()) -> Recipe:
    """Return a recipe from the package, a YAML file or a mapping, with `overrides` applied.

    Args:
        source: the name of a recipe in the package ("yarn": `posswap recipes` lists them), a file ("mine.yaml"), or
            the mapping that a file would hold. `include:` in a file names the files that it builds on.
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
        values = override(source, overrides)
        _import(values)
        return make_recipe(values)
    path = find_recipe(source)
    values = override(read_yaml(path), overrides)
    _import(values)
    return make_recipe({**values, "name": values.get("name") or path.stem}, where=str(source))


def _import(values: Mapping[str, object]) -> None:
    """Import the modules that a recipe names, which register its schemes."""
    names = values.get("imports")
    for name in names if isinstance(names, list | tuple) else ():  # anything else is refused with all other values
        if isinstance(name, str):
            try:
                import_module(name)
            except OptionError as error:
                raise ConfigError(f"imports: {error}") from error


def check_recipe(recipe: object, function: str) -> None:
    """Raise a ConfigError if `recipe`, an argument of `function`, is not what `load_recipe` returns."""
    from hf_posswap.training.config.settings import Recipe

    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"{function} takes what load_recipe returns, got {brief_repr(recipe)}: call load_recipe first, with the "
            'name of a recipe, a file or a dict, and changes such as ["model.name=my-llama"].'
        )


def make_recipe(values: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """Return the recipe of `values`, the mapping that a YAML file would hold.

    Raises:
        ConfigError: as `load_recipe`.
    """
    from hf_posswap.training.config.checking import check
    from hf_posswap.training.config.settings import Recipe
    from hf_posswap.training.config.theirs import read_peft
    from hf_posswap.training.config.typed import read

    problems = Problems()
    replaced = dict(values)
    if isinstance(replaced.get("swap"), Mapping):
        replaced["swap"] = _with_scheme(replaced["swap"], "swap", problems)
    if isinstance(replaced.get("stages"), list):
        replaced["stages"] = [
            _with_scheme(stage, f"stages[{number}]", problems) if isinstance(stage, Mapping) else stage
            for number, stage in enumerate(replaced["stages"])
        ]
    recipe = read(Recipe, replaced, problems)
    recipe = dataclasses.replace(recipe, peft=read_peft(recipe.peft, problems))
    problems.take(check(recipe))
    all_problems = problems.entries
    if all_problems:
        count = "1 problem" if len(all_problems) == 1 else f"{len(all_problems)} problems"
        raise ConfigError(f"{where} has {count}: " + " ".join(f"({n}) {p}" for n, p in enumerate(all_problems, 1)))
    return recipe


def _with_scheme(values: Mapping[str, object], key: str, problems: Problems) -> dict[str, object]:
    replaced = dict(values)
    scheme = replaced.get("scheme")
    if isinstance(scheme, str) and scheme.endswith(JSON):
        try:
            replaced["scheme"] = read_json(expand_home(scheme))
        except CheckpointError as error:
            problems.add(f"{key}.scheme", f"{error} posswap search writes such a file.")
            del replaced["scheme"]
    return replaced


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return `recipe` as JSON that `make_recipe` reads; `training` holds only what differs from transformers."""
    from hf_posswap.training.config.theirs import non_default_settings

    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return json.loads(json.dumps(fields | {"training": non_default_settings(recipe.training)}, default=_as_json))


def _as_json(value: Any) -> object:
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_dataclass else str(value)
