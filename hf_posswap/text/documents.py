"""Documents from files and folders, from data sets that were saved to disk, and from data sets on the Hub."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_posswap.errors import DataError, MissingDependencyError
from hf_posswap.text.chats import no_text, row_document
from hf_posswap.text.stdlib import Document
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
    try:
        content = read_bounded_json(folder / _SEVERAL)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / _SEVERAL} cannot be read: {error}.") from error
    splits: list[str] | None = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(splits, list) or not all(_is_split(folder, name) for name in splits):
        raise DataError(f"{folder / _SEVERAL} does not name the splits in {folder}: save the data set again.")
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


def _is_split(folder: Path, name: object) -> bool:
    """Return whether `name`, from a file, is that of a folder in `folder`, and not of one elsewhere."""
    return (
        isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name and (folder / name).is_dir()
    )


def saved_rows(folder: Path) -> Iterator[dict[str, object]]:
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


TEXT_FILES = (".txt", ".md", ".rst", ".py")
ROW_FILES = (".jsonl", ".json", ".parquet")
_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(@(?P<revision>[\w./-]+))?(:(?P<split>[\w.-]+))?")


@dataclass(frozen=True)
class HubText:
    """A data set on the Hub.

    Attributes:
        name: "organisation/data set".
        split: the split; None: the first one found among the requested splits.
        revision: a commit, branch or tag; None: the newest commit.
    """

    name: str
    split: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.name}{revision}" + ("" if self.split is None else f":{self.split}")


def hub_text(path: str | Path) -> HubText | None:
    """Return the data set named by "org/name", "org/name:split" or "org/name@revision:split", or None for a path.

    An existing file or folder is a path, and so are a folder of `save_to_disk` with a split behind it, and a name with
    the suffix of a text file.

    Example:
        >>> hub_text("deepmind/pg19:test"), hub_text("books/emma.txt"), hub_text("./books")
        (HubText(name='deepmind/pg19', split='test', revision=None), None, None)
        >>> print(hub_text("org/name@v1.0:train"))
        org/name@v1.0:train
    """
    match = _ID.fullmatch(str(path))
    if match is None or Path(path).suffix in (*TEXT_FILES, *ROW_FILES):
        return None
    if Path(path).exists() or is_saved(Path(match["name"])):
        return None
    return HubText(match["name"], match["split"], match["revision"])


def require_datasets() -> None:
    """Check that data sets can be read.

    Raises:
        MissingDependencyError: the package datasets is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise MissingDependencyError("datasets", "train")


def hub_documents(
    source: HubText, *, column: str, splits: tuple[str, ...], streaming: bool = True, chats: bool = False
) -> Iterator[Document]:
    """Yield the rows of a data set as documents, in order.

    Args:
        source: the data set.
        column: the text column.
        splits: splits to look for, in this order, if `source` names none.
        streaming: fetch row by row; otherwise download the whole data set first.
        chats: whether a row without text may be a `Chat`.

    Raises:
        DataError: it cannot be reached or read, or has no such split or column.
        MissingDependencyError: the package datasets is not installed.
    """
    require_datasets()
    try:
        for number, row in enumerate(_rows(source, splits, streaming)):
            document = row_document(row, f"{source} {number}", column, chats=chats)
            if document is None:
                raise no_text(row, f"row {number} of {source}", column, chats=chats)
            yield document
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = said_by(error).rstrip(".")
        raise DataError(
            f"the data set {source} cannot be read: {reason}. Give org/name:split of one that can be reached, or files."
        ) from error


def _rows(source: HubText, splits: tuple[str, ...], streaming: bool) -> Iterator[dict[str, object]]:
    from datasets import load_dataset

    if source.split is not None:
        return iter(load_dataset(source.name, split=source.split, revision=source.revision, streaming=streaming))
    dataset = load_dataset(source.name, revision=source.revision, streaming=streaming)
    split = next((name for name in splits if name in dataset), None)
    if split is None:
        raise DataError(f"the data set {source} has the splits {', '.join(dataset)}: name one, as {source}:SPLIT.")
    return iter(dataset[split])


_ABOUT = "readme"
"""A folder's README describes its documents, and is not one of them."""
GIVE = (
    "give text files, a folder of them, .jsonl or .parquet, a folder of Dataset.save_to_disk, or org/name of a data "
    "set on the Hub"
)


def files_below(path: Path, splits: tuple[str, ...] = ()) -> list[Path]:
    """Return `path` itself, or the document files in and below that folder, sorted by name.

    A README in a folder (README.md, readme.txt, ...) is skipped, and so are hidden files and what is in hidden folders,
    such as `.ipynb_checkpoints`; given by itself each is a document. The folder of a saved data set is one "file".

    Args:
        path: a file, a folder, or "folder:split" of a saved `DatasetDict`.
        splits: splits of a saved `DatasetDict` to take, in this order, if `path` names none.

    Raises:
        DataError: it does not exist, or holds no document file.
    """
    saved = saved_data_set(path, splits)
    if saved is not None:
        return [saved]
    path = expand_home(path)
    if path.is_dir():
        suffixes = (*TEXT_FILES, ".jsonl", ".parquet")
        files = (file for file in path.rglob("*") if file.suffix in suffixes and file.stem.lower() != _ABOUT)
        visible = (file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))
        documents = sorted(file for file in visible if file.is_file())
        if not documents:
            raise DataError(
                f"{path} holds no document: no file in or below it ends in {', '.join(suffixes)} (hidden ones and "
                f"READMEs do not count); {GIVE}."
            )
        return documents
    if not path.is_file():
        raise DataError(f"{path} does not exist; {GIVE}.")
    return [path]


def file_documents(path: Path, column: str, *, chats: bool = False) -> Iterator[Document]:
    """Yield the documents of one file: a text file is one document, a file of rows has one per row.

    Args:
        path: a .txt, .md, .rst, .py, .jsonl, .json (one object per line) or .parquet file, or the folder of a saved
            data set.
        column: the text column of rows.
        chats: whether a row without text may be a `Chat`.

    Raises:
        DataError: it is empty, of an unknown kind or cannot be read, or a row has no text.
        MissingDependencyError: a parquet file or a saved data set needs the package datasets.
    """
    some = False
    for document in _of_file(path, column, chats):
        some = some or bool(document.text)
        yield document
    if not some:
        raise DataError(f"{path} is empty: there is no document in it.")


def row_documents(rows: Iterable[object], name: str, column: str, *, chats: bool = False) -> Iterator[Document]:
    """Yield each of `rows`, strings or dicts with a text column, as a document named `name` and its number.

    With `chats`, a row without text may be a `Chat`: messages, or prompt and completion.

    Raises:
        DataError: a row has no text.

    Example:
        >>> [document.name for document in row_documents(["a", {"text": "b"}], "row", "text")]
        ['row 0', 'row 1']
    """
    for number, row in enumerate(rows):
        document = row_document(row, f"{name} {number}", column, chats=chats)
        if document is None:
            raise no_text(row, f"{name} {number}", column, chats=chats)
        yield document


def _of_file(path: Path, column: str, chats: bool) -> Iterator[Document]:
    if path.is_dir():
        return row_documents(saved_rows(path), path.name, column, chats=chats)
    if path.suffix == ".parquet":
        return row_documents(_parquet(path), path.name, column, chats=chats)
    if path.suffix in ROW_FILES:
        return row_documents(_json_lines(path), path.name, column, chats=chats)
    if path.suffix not in TEXT_FILES:
        raise DataError(f"{path} is of an unknown kind; known: {', '.join((*TEXT_FILES, *ROW_FILES))}.")
    try:
        return iter([Document(str(path), path.read_text(encoding="utf-8-sig"))])
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}.") from error


def _json_lines(path: Path) -> Iterator[object]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        f"{path}, line {number} is not valid JSON ({error}): give one object a line."
                    ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}.") from error


def _parquet(path: Path) -> Iterator[object]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependencyError("datasets", "train") from error
    try:
        yield from load_dataset("parquet", data_files=str(path), split="train", streaming=True)  # not copied to a cache
    except (OSError, ValueError) as error:  # those of pyarrow are ValueError
        raise DataError(f"{path} cannot be read as parquet: {said_by(error)}.") from error
