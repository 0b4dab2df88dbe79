"""Documents from a data set on the Hub, fetched row by row on demand."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.errors import DataError, MissingDependencyError
from hf_posswap.text.chats import no_text, row_document
from hf_posswap.text.saved import is_saved
from hf_posswap.text.stdlib import Document
from hf_posswap.utils.format import said_by

TEXT_FILES = (".txt", ".md", ".rst", ".py")
ROW_FILES = (".jsonl", ".json", ".parquet")
_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(:(?P<split>[\w.-]+))?")


@dataclass(frozen=True)
class HubText:
    """A data set on the Hub.

    Attributes:
        name: "organisation/data set".
        split: the split; None: the first one found among the requested splits.
    """

    name: str
    split: str | None = None

    def __str__(self) -> str:
        return self.name if self.split is None else f"{self.name}:{self.split}"


def hub_text(path: str | Path) -> HubText | None:
    """Return the data set named by "org/name" or "org/name:split", or None for a path.

    An existing file or folder is a path, and so are a folder of `save_to_disk` with a split behind it, and a name with
    the suffix of a text file.

    Example:
        >>> hub_text("deepmind/pg19:test"), hub_text("books/emma.txt"), hub_text("./books")
        (HubText(name='deepmind/pg19', split='test'), None, None)
    """
    match = _ID.fullmatch(str(path))
    if match is None or Path(path).suffix in (*TEXT_FILES, *ROW_FILES):
        return None
    if Path(path).exists() or is_saved(Path(match["name"])):
        return None
    return HubText(match["name"], match["split"])


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


def _rows(source: HubText, splits: tuple[str, ...], streaming: bool) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    if source.split is not None:
        return iter(load_dataset(source.name, split=source.split, streaming=streaming))
    dataset: Any = load_dataset(source.name, streaming=streaming)
    split = next((name for name in splits if name in dataset), None)
    if split is None:
        raise DataError(f"the data set {source} has the splits {', '.join(dataset)}: name one, as {source}:SPLIT.")
    return iter(dataset[split])
