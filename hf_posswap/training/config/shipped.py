"""The recipes that come with the package, found by name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from hf_posswap.errors import ConfigError, UnknownNameError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.user_paths import expand_home

_PACKAGE = Path(__file__).resolve().parents[2]
INSTALLED = _PACKAGE / "shipped_recipes"
"""Their folder in a wheel: pyproject.toml copies the top-level folder there."""
CHECKOUT = _PACKAGE.parent / "recipes"
"""Their folder in a checkout and in an editable install."""
LAUNCHERS = "accelerate"
"""The folder of files for accelerate launch: they are listed and copied, but are not recipes to train."""
SUFFIXES = (".yaml", ".yml")
_SWAP = re.compile(r"(.+?) to (.+), (\S+ M) tokens, (stock|plugin)")
_SECTION = re.compile(r"# ([A-Z][a-z]+):\s+(.*)")


@dataclass(frozen=True)
class ShippedRecipe:
    """One recipe of the package, or a file that recipes need.

    Attributes:
        name: of its file, without the suffix, with the folder below that of the recipes.
        path: of its file.
        header: sections of its header comment: "Purpose", "Swap", "Source", "Launch", "Cost", "Expected"; only
            "Purpose" for a file that is not a recipe to train.
    """

    name: str
    path: Path
    header: dict[str, str]

    @property
    def trains(self) -> bool:
        """Whether `posswap train NAME` runs it."""
        return len(self.header) > 1

    @property
    def swap(self) -> tuple[str, str, str, str]:
        """The positions that it starts from, the new ones, the tokens, and "stock" or "plugin": who loads the result.

        Example:
            >>> shipped_recipe("yarn").swap
            ('RoPE', 'YaRN', '210 M', 'stock')
        """
        match = _SWAP.fullmatch(self.header["Swap"])
        if match is None:
            raise ConfigError(f"{shown(self.path)}: the header needs Swap: OLD to NEW, N M tokens, stock or plugin.")
        return match[1], match[2], match[3], match[4]

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
        >>> recipes = shipped_recipes()
        >>> recipes["yarn"].header["Purpose"], recipes["yarn"].trains, recipes["accelerate/ddp"].trains
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
    """Return the file that `given` names: a recipe of the package, or the user's own file.

    A file needs its suffix or a folder (`mine.yaml`, `./mine`). A bare word is always a recipe's name, even if the
    working folder has a file or folder of that name.

    Raises:
        UnknownNameError: a bare word that is not a recipe's name.
        ConfigError: there is no such file, and the package has a recipe of that name.

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
    """Return the sections of the comment at the top of the file; without sections, all of it is the purpose."""
    text = path.read_text(encoding="utf-8").splitlines()
    lines = [line.rstrip() for line in takewhile(lambda line: line.startswith("#"), text)]
    sections: dict[str, list[str]] = {}
    section = ""
    for line in lines:
        match = _SECTION.fullmatch(line)
        if match:
            section = match[1]
            sections[section] = [match[2]]
        elif section:
            sections[section].append(line.removeprefix("#").strip())
    unsectioned = {"Purpose": [line.removeprefix("#").strip() for line in lines]}
    return {name: " ".join(section_lines) for name, section_lines in (sections or unsectioned).items()}
