"""Documents streamed from a data set on the Hub: no more of it is fetched than is measured on."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.corpus import Document
from hf_posswap.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(:(?P<split>[\w.-]+))?")
_SPLITS = ("test", "validation", "train")
_FILES = (".txt", ".md", ".rst", ".py", ".jsonl", ".json", ".parquet")
_MOST_ROWS = 100_000
_CHARACTERS_A_TOKEN = 32


@dataclass(frozen=True)
class HubText:
    """A data set on the Hub.

    Attributes:
        name: "organisation/data set".
        split: of it; None: test, validation or train, the first that it has.
    """

    name: str
    split: str | None = None

    def __str__(self) -> str:
        return self.name if self.split is None else f"{self.name}:{self.split}"


def hub_text(path: str | Path) -> HubText | None:
    """Return the data set that "org/name" or "org/name:split" names; None: it is a path.

    What exists is a path, and so is what ends like a file of text.

    Example:
        >>> hub_text("deepmind/pg19:test"), hub_text("books/emma.txt"), hub_text("./books")
        (HubText(name='deepmind/pg19', split='test'), None, None)
    """
    found = _ID.fullmatch(str(path))
    if found is None or Path(path).exists() or Path(path).suffix in _FILES:
        return None
    return HubText(found["name"], found["split"])


def require_datasets() -> None:
    """Check that data sets can be read.

    Raises:
        MissingDependencyError: the package datasets is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise MissingDependencyError("datasets", "train")


def stream_documents(
    source: HubText, tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int, column: str
) -> list[Document]:
    """Return the first `limit` rows of a data set that have `length` tokens, from its first 100,000.

    Args:
        source: which data set.
        tokenizer: of the models.
        length: tokens of each document.
        limit: most documents to take.
        column: that holds the text.

    Raises:
        DataError: it cannot be reached or read, has no such split or column, or fewer than two rows are long enough.
        MissingDependencyError: the package datasets is not installed.
    """
    require_datasets()
    kept: list[Document] = []
    seen = 0
    try:
        for number, row in enumerate(_rows(source)):
            seen = number + 1
            text = row.get(column)
            if not isinstance(text, str):
                raise DataError(
                    f"row {number} of {source} has no text under {column!r}, it has columns {sorted(row)}: name the "
                    "column of text."
                )
            text = text[: length * _CHARACTERS_A_TOKEN]
            if _tokens(text, tokenizer) >= length:
                kept.append(Document(f"{source} {number}", text))
            if len(kept) == limit or seen == _MOST_ROWS:
                break
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"the data set {source} cannot be read: {reason}. Give org/name:split of one that can be reached, or files."
        ) from error
    if len(kept) < 2:
        raise DataError(
            f"{len(kept)} of the first {seen} rows of {source} have {length} tokens, at least 2 are needed: give a "
            "data set of longer documents or measure shorter lengths."
        )
    return kept


def _rows(source: HubText) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    if source.split is not None:
        return iter(load_dataset(source.name, split=source.split, streaming=True))
    splits: Any = load_dataset(source.name, streaming=True)
    split = next((name for name in _SPLITS if name in splits), None)
    if split is None:
        raise DataError(f"the data set {source} has the splits {', '.join(splits)}: name one, as {source}:SPLIT.")
    return iter(splits[split])


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return len(ids) + (tokenizer.bos_token_id is not None)
