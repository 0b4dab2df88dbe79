"""Copies of the package's recipes, to edit."""

from __future__ import annotations

from pathlib import Path

from hf_posswap.errors import ConfigError
from hf_posswap.training.config.reading import included_files
from hf_posswap.training.config.shipped import SUFFIXES, shipped_recipe
from hf_posswap.utils.atomic_io import write_text
from hf_posswap.utils.untrusted import read_bounded


def copy_recipe(name: str, target: Path) -> list[Path]:
    """Copy a recipe of the package and the files that it includes, to edit them; return the files, the recipe first.

    Args:
        name: of the recipe.
        target: a file that ends in .yaml, or a folder, created if missing. Included files keep their names and go to
            the same folder; a file that already exists with the same text is kept.

    Raises:
        UnknownNameError: there is no such recipe.
        ConfigError: a different file exists where one would be written; nothing is written then.
        CheckpointError: the target cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in copy_recipe("control", Path(folder) / "mine.yaml")]
        ['mine.yaml', 'learned-to-rope.yaml', 'base.yaml']
    """
    recipe = shipped_recipe(name)
    main_target = target if target.suffix in SUFFIXES and not target.is_dir() else target / recipe.path.name
    texts = {main_target: recipe.text}
    for path in included_files(recipe.path):
        include_target = main_target.parent / path.relative_to(recipe.path.parent)
        if include_target in texts:
            raise ConfigError(f"{main_target}: {name} includes a file of that name; give another name.")
        texts[include_target] = path.read_text(encoding="utf-8")
    conflicts = [path for path, text in texts.items() if path.exists() and not _has_text(path, text)]
    if conflicts:
        raise ConfigError(
            f"{', '.join(map(str, conflicts))} exists and is not overwritten: give another file or folder, or move it."
        )
    for path, text in texts.items():
        if not path.exists():
            write_text(path, text)
    return list(texts)


def _has_text(path: Path, text: str) -> bool:
    try:
        return read_bounded(path) == text
    except (OSError, ValueError):
        return False
