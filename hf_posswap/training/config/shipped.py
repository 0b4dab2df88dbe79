"""The recipes that come with the package, found by name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_posswap.errors import ConfigError, UnknownNameError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.user_paths import expand_home

_PACKAGE = Path(__file__).resolve().parents[2]
INSTALLED = _PACKAGE / "shipped_recipes"
"""Where a wheel has them: pyproject.toml puts the top-level folder there."""
CHECKOUT = _PACKAGE.parent / "recipes"
"""Where they are written, and where an editable install finds them."""
LAUNCHERS = "accelerate"
"""The folder of files for accelerate launch: they are listed and copied, and no training by themselves."""
SUFFIXES = (".yaml", ".yml")
_PART = re.compile(r"# ([A-Z][a-z]+):\s+(.*)")


@dataclass(frozen=True)
class ShippedRecipe:
    """One recipe of the package, or a file that recipes need.

    Attributes:
        name: of its file, without the suffix, with the folder below that of the recipes.
        path: of its file.
        header: what its comments say: "Purpose", "Source", "Launch", "Cost", "Expected"; of a file that is no training
            by itself, "Purpose" alone.
    """

    name: str
    path: Path
    header: dict[str, str]

    @property
    def trains(self) -> bool:
        """Whether `posswap train NAME` runs it."""
        return len(self.header) > 1

    @property
    def text(self) -> str:
        """The file."""
        return self.path.read_text(encoding="utf-8")


def recipes_folder() -> Path:
    """Return the folder of the recipes: the installed package's, or a checkout's own.

    Raises:
        ConfigError: there is none.
    """
    if INSTALLED.is_dir():
        return INSTALLED
    if CHECKOUT.is_dir() and (CHECKOUT.parent / "pyproject.toml").is_file():
        return CHECKOUT
    raise ConfigError(f"this installation of hf_posswap has no recipes in {INSTALLED}: install it again, as a wheel.")


def shipped_recipes() -> dict[str, ShippedRecipe]:
    """Return the recipes of the package by name, and last the files for accelerate launch.

    Example:
        >>> found = shipped_recipes()
        >>> found["yarn"].header["Purpose"], found["yarn"].trains, found["accelerate/ddp"].trains
        ('longer context for a RoPE model at the least cost in tokens: YaRN.', True, False)
    """
    folder = recipes_folder()
    paths = [*sorted(folder.glob("*.yaml")), *sorted((folder / LAUNCHERS).glob("*.yaml"))]
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in paths]
    return {name: ShippedRecipe(name, path, _header(path)) for name, path in zip(names, paths, strict=True)}


def shipped_recipe(name: str) -> ShippedRecipe:
    """Return the recipe of the package called `name`.

    Raises:
        UnknownNameError: there is none.
    """
    known = shipped_recipes()
    if name not in known:
        raise UnknownNameError("recipe", name, known)
    return known[name]


def find_recipe(given: str | Path) -> Path:
    """Return the file that `given` means: a recipe of the package by its name, or a file of one's own.

    A file is given with its suffix or a folder (`mine.yaml`, `./mine`); a bare word is a name, whatever lies in the
    working folder, where a training may have left a folder of that name.

    Raises:
        UnknownNameError: a bare word that is no recipe's name.
        ConfigError: no such file, and the package has a recipe of its name.

    Example:
        >>> find_recipe("yarn").name
        'yarn.yaml'
    """
    path, known = expand_home(given), shipped_recipes()
    if path.name in known and len(path.parts) == 1:
        return known[path.name].path
    exists = os.path.lexists(path)
    if exists or len(path.parts) > 1 or path.suffix in SUFFIXES:
        if not exists and path.stem in known:
            raise ConfigError(
                f"{shown(path)} does not exist. The package has a recipe of that name: give {path.stem!r}."
            )
        return path
    raise UnknownNameError("recipe", str(given), (name for name, recipe in known.items() if recipe.trains))


def _header(path: Path) -> dict[str, str]:
    """Return the parts of the comment at the top of the file: without parts, all of it is its purpose."""
    lines = list(_comment(path))
    found: dict[str, list[str]] = {}
    part = ""
    for line in lines:
        begins = _PART.fullmatch(line)
        if begins:
            part = begins[1]
            found[part] = [begins[2]]
        elif part:
            found[part].append(line.removeprefix("#").strip())
    whole = {"Purpose": [line.removeprefix("#").strip() for line in lines]}
    return {name: " ".join(said) for name, said in (found or whole).items()}


def _comment(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line.rstrip()
