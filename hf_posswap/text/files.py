"""Documents from files and folders of text, JSON lines, parquet and saved data sets, one after another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_posswap.errors import DataError, MissingDependencyError
from hf_posswap.text.chats import no_text, row_document
from hf_posswap.text.hub import ROW_FILES, TEXT_FILES
from hf_posswap.text.saved import saved_data_set, saved_rows
from hf_posswap.text.stdlib import Document
from hf_posswap.utils.user_paths import expand_home

_ABOUT = "readme"
"""A folder's README describes its documents, and is not one of them."""
GIVE = (
    "give text files, a folder of them, .jsonl or .parquet, a folder of Dataset.save_to_disk, or org/name of a data "
    "set on the Hub"
)


def files_below(path: Path, splits: tuple[str, ...] = ()) -> list[Path]:
    """Return `path` itself, or the document files in and below that folder, sorted by name.

    A README in a folder (README.md, readme.txt, ...) is skipped; given by itself it is a document. The folder of a
    saved data set is one "file".

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
        files = (file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
        documents = sorted(file for file in files if file.stem.lower() != _ABOUT)
        if not documents:
            raise DataError(f"{path} holds no document: no file in or below it ends in {', '.join(suffixes)}; {GIVE}.")
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


def row_documents(rows: Iterable[Any], name: str, column: str, *, chats: bool = False) -> Iterator[Document]:
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
        return iter([Document(str(path), path.read_text(encoding="utf-8"))])
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}.") from error


def _json_lines(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}, line {number} is no JSON ({error}): give one object a line.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}.") from error


def _parquet(path: Path) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependencyError("datasets", "train") from error
    return load_dataset("parquet", data_files=str(path), split="train", streaming=True)  # not copied into a cache
