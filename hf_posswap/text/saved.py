"""Documents from a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` of the package datasets wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_posswap.errors import DataError, MissingDependencyError
from hf_posswap.utils.format import said_by
from hf_posswap.utils.untrusted import read_bounded_json
from hf_posswap.utils.user_paths import expand_home

_ONE = ("state.json", "dataset_info.json")
"""Files in the folder of one data set."""
_SEVERAL = "dataset_dict.json"
"""File in the folder of several splits, each of which is the folder of one data set."""


def is_saved(folder: Path) -> bool:
    """Return whether a data set, or several splits of one, were saved in `folder`."""
    return all((folder / name).is_file() for name in _ONE) or (folder / _SEVERAL).is_file()


def saved_data_set(path: str | Path, preferred: tuple[str, ...] = ()) -> Path | None:
    """Return the folder of the saved data set that "folder" or "folder:split" names; None: no data set is saved there.

    Args:
        path: with a split if the folder holds several.
        preferred: splits to take, in this order, if `path` names none; a single split is taken anyway.

    Raises:
        DataError: there is no such split, several and none is named, or the list of splits cannot be read.
    """
    folder, split = _parse(expand_home(path))
    if folder is None or not is_saved(folder):
        return None
    if all((folder / name).is_file() for name in _ONE):
        if split is not None:
            raise DataError(f"{path}: {folder} is one data set without splits; give {folder}.")
        return folder
    splits = _splits_in(folder)
    if split is None:
        candidates = splits if len(splits) == 1 else [name for name in preferred if name in splits]
        split = next(iter(candidates), None)
    if split not in splits:
        missing = "" if split is None else f"has no split {split!r}; it "
        raise DataError(f"{folder} {missing}has the splits {', '.join(splits)}: name one, as {folder}:SPLIT.")
    return folder / split


def _parse(path: Path) -> tuple[Path | None, str | None]:
    """Return the existing folder that `path` names, and its split; None: there is no such folder."""
    if path.is_dir():
        return path, None
    name, colon, split = str(path).rpartition(":")
    return (Path(name), split) if colon and split and Path(name).is_dir() else (None, None)


def _splits_in(folder: Path) -> list[str]:
    try:
        content = read_bounded_json(folder / _SEVERAL)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / _SEVERAL} cannot be read: {error}.") from error
    splits = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(splits, list) or not all(_is_split(folder, name) for name in splits):
        raise DataError(f"{folder / _SEVERAL} does not name the splits in {folder}: save the data set again.")
    return splits


def _is_split(folder: Path, name: Any) -> bool:
    """Return whether `name`, from a file, is that of a folder in `folder`, and not of one elsewhere."""
    return (
        isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name and (folder / name).is_dir()
    )


def saved_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the saved data set in `folder`, in order; they stay on disk.

    Raises:
        DataError: it cannot be read.
        MissingDependencyError: the package datasets is not installed.
    """
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise MissingDependencyError("datasets", "train") from error
    try:
        yield from load_from_disk(str(folder))
    except Exception as error:  # pyarrow and datasets raise errors of many kinds at a damaged file
        reason = said_by(error).rstrip(".")
        raise DataError(f"the data set saved in {folder} cannot be read: {reason}. Save it again.") from error
