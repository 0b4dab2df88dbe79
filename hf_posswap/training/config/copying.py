"""Copies of the package's recipes, to be changed."""

from __future__ import annotations

from pathlib import Path

from hf_posswap.errors import ConfigError
from hf_posswap.training.config.reading import included_files
from hf_posswap.training.config.shipped import SUFFIXES, shipped_recipe
from hf_posswap.utils.atomic_io import write_text
from hf_posswap.utils.untrusted import read_bounded


def copy_recipe(name: str, target: Path) -> list[Path]:
    """Write a recipe of the package, and what it includes, to where it can be changed; return the files, it first.

    Args:
        name: of the recipe.
        target: a file that ends in .yaml, or a folder, made where it is missing. What the recipe includes goes beside
            it, under its own name; where the same file lies there already, from an earlier copy, it stays.

    Raises:
        UnknownNameError: there is no such recipe.
        ConfigError: another file lies where one is to be written; nothing is written then.
        CheckpointError: the place cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in copy_recipe("control", Path(folder) / "mine.yaml")]
        ['mine.yaml', 'learned-to-rope.yaml', 'base.yaml']
    """
    recipe = shipped_recipe(name)
    first = target if target.suffix in SUFFIXES and not target.is_dir() else target / recipe.path.name
    wanted = {first: recipe.text}
    for path in included_files(recipe.path):
        beside = first.parent / path.relative_to(recipe.path.parent)
        if beside in wanted:
            raise ConfigError(f"{first}: {name} includes a file of that name; give another name.")
        wanted[beside] = path.read_text(encoding="utf-8")
    taken = [path for path, text in wanted.items() if path.exists() and not _holds(path, text)]
    if taken:
        raise ConfigError(
            f"{', '.join(map(str, taken))} exists and is not overwritten: give another file or folder, or move it."
        )
    for path, text in wanted.items():
        if not path.exists():
            write_text(path, text)
    return list(wanted)


def _holds(path: Path, text: str) -> bool:
    try:
        return read_bounded(path) == text
    except (OSError, ValueError):
        return False
