"""Evaluation documents: from files, a data set, a list, or the running Python's own sources.

Of a data set on the Hub they are the first long documents. Documents of the requested length are beginnings of long
ones and, if these are too few, short ones joined.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.errors import DataError, DataWarning, OptionError
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.text.documents import (
    HubText,
    file_documents,
    files_below,
    hub_documents,
    hub_text,
    require_datasets,
    row_documents,
)
from hf_posswap.text.stdlib import PYTHON, Document, python_corpus
from hf_posswap.text.tokens import split_by_length
from hf_posswap.utils.format import public_name
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_posswap.comparison.report.results import DataEntry


_SPLITS = ("test", "validation", "train")
_MOST_ROWS = 100_000
_CHARACTERS_PER_TOKEN = 32
WHOLE, JOINED = "whole_documents", "concatenated"
TEXT = "text"


def stream_documents(
    source: HubText, tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int, column: str, begin: bool = True
) -> list[Document]:
    """Return the first `limit` rows with at least `length` tokens among the first 100,000 rows of a data set.

    If too few are as long, shorter rows for `joining` are returned too, up to `limit` times `length` tokens.

    Args:
        source: the data set; without a split, the first of test, validation and train that it has.
        tokenizer: the models' tokenizer.
        length: tokens of each document.
        limit: maximum number of documents.
        column: the text column.
        begin: as in `read_documents`.

    Raises:
        DataError: the data set cannot be reached or read, has no such split or column, or has too little text.
        MissingDependencyError: the package datasets is not installed.
    """
    kept: list[Document] = []
    shorter: list[Document] = []
    seen = shorter_tokens = 0
    for seen, document in enumerate(hub_documents(source, column=column, splits=_SPLITS), 1):
        text = document.text[: length * _CHARACTERS_PER_TOKEN]
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        tokens = len(ids) + (begin and tokenizer.bos_token_id is not None)
        if tokens >= length:
            kept.append(Document(document.name, text))
        elif shorter_tokens < limit * length:
            shorter.append(Document(document.name, text))
            shorter_tokens += tokens
        if len(kept) == limit or seen == _MOST_ROWS:
            break
    if len(kept) + shorter_tokens // length < 2:
        raise DataError(
            f"{len(kept)} of the first {seen} rows of {source} have {length} tokens, at least 2 are needed: give a "
            "data set of longer documents or measure shorter lengths."
        )
    return kept if len(kept) >= min(limit, LEAST_DOCUMENTS) else [*kept, *shorter]


@dataclass(frozen=True)
class Cut:
    """Text of one length.

    Attributes:
        names: names of the rows; a joined row is named after its first document and the number of further ones.
        tokens: token ids, [N, L].
        protocol: `WHOLE`: each row is the beginning of one document; `JOINED`: some rows are concatenated short
            documents, so that far context is other documents' text.
        said: the protocol as text, with the numbers of rows.
    """

    names: tuple[str, ...]
    tokens: np.ndarray
    protocol: str
    said: str


def cut_documents(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int, begin: bool = True
) -> Cut:
    """Return the first `length` tokens of up to `limit` documents; short ones are joined if too few are long enough.

    If at least min(8, `limit`) documents are long enough, or joining gives no further row, each row is the beginning of
    one document, and shorter documents are dropped. Otherwise short documents are concatenated to further rows, whose
    last one is truncated.

    Args:
        documents: in order of use; those after the `limit`th that is long enough are not read.
        tokenizer: the models' tokenizer.
        length: tokens of a row.
        limit: maximum number of rows.
        begin: as in `read_documents`.

    Raises:
        DataError: there are fewer than two rows.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> cut = cut_documents([Document(n, "ab" * 3) for n in "uvwxyz"], byte_tokenizer(), length=10, limit=9)
        >>> cut.names, cut.protocol
        (('u and 1 more', 'w and 1 more', 'y and 1 more'), 'concatenated')
    """
    long, short = split_by_length(documents, tokenizer, length=length, limit=limit, begin=begin)
    joined = _join(short, length)[: limit - len(long)] if len(long) < min(limit, LEAST_DOCUMENTS) else []
    rows = long + joined
    if len(rows) < 2:
        raise DataError(
            f"{len(long)} of {len(long) + len(short)} held-out documents have {length} tokens, at least 2 are needed, "
            f"and joining the others gives {len(joined)}: give more or longer documents, or measure shorter lengths."
        )
    if joined:
        protocol_text = (
            f"{len(joined)} of {len(rows)} are short documents joined to {length:,} tokens, because only {len(long)} "
            "are that long: far context is other documents' text there"
        )
    else:
        protocol_text = "each is the beginning of one document" + (
            f"; {len(short)} shorter ones are left out" if short else ""
        )
    names = tuple(name for name, _ in rows)
    return Cut(names, np.stack([ids for _, ids in rows]), JOINED if joined else WHOLE, protocol_text)


def _join(documents: Sequence[tuple[str, np.ndarray]], length: int) -> list[tuple[str, np.ndarray]]:
    """Concatenate consecutive documents to rows of `length` tokens; a remainder that fills no row is dropped."""
    rows: list[tuple[str, np.ndarray]] = []
    names: list[str] = []
    chunks: list[np.ndarray] = []
    count = 0
    for name, ids in documents:
        names, chunks, count = [*names, name], [*chunks, ids], count + len(ids)
        if count >= length:
            rows.append((f"{names[0]} and {len(names) - 1} more", np.concatenate(chunks)[:length]))
            names, chunks, count = [], [], 0
    return rows


@dataclass(frozen=True, repr=False)
class EvalDocuments(ResultView):
    """The first tokens of some documents.

    Attributes:
        source: where they come from, as text.
        names: names of the documents.
        tokens: token ids, [N, L].
        protocol: how documents were cut to rows, as in `hf_posswap.comparison.documents.Cut`.
        said: the protocol as text.
    """

    source: str
    names: tuple[str, ...]
    tokens: np.ndarray
    protocol: str = WHOLE
    said: str = "each is the beginning of one document"

    def _repr_facts(self) -> dict[str, object]:
        return {"source": self.source, "documents": len(self.names), "tokens": self.tokens, "protocol": self.protocol}

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """A hash of the tokens of each document."""
        return tuple(hashlib.sha256(row.astype("<i8").tobytes()).hexdigest()[:16] for row in self.tokens)

    def to_dict(self) -> DataEntry:
        """Return the entry of the documents in results.json."""
        digest = hashlib.sha256("".join(self.digests).encode()).hexdigest()
        return {
            "source": self.source,
            "documents": len(self.names),
            "digest": digest,
            "names": list(self.names),
            "protocol": {"id": self.protocol, "said": self.said},
        }


def read_documents(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    limit: int,
    column: str = TEXT,
    begin: bool = True,
) -> EvalDocuments:
    """Return the first `length` tokens of the first `limit` documents; short ones are joined if too few are as long.

    Args:
        source: None: the held-out part of the running Python's own sources and documentation. A path or a list of
            paths: .txt, .md, .rst and .py files are one document each, .jsonl and .json lines and .parquet rows one
            each, folders are read recursively, a folder of `Dataset.save_to_disk` as its rows ("folder:split" of one
            with several splits); "org/name" or "org/name:split" is a data set on the Hub, of which only the needed
            rows are fetched. Otherwise an iterable of strings, or of rows with a text column such as a
            `datasets.Dataset`. It is read in order until `limit` documents are long enough, because the ones after them
            are not used, or to its end; of one without a length, such as a generator or a streamed data set, at most
            100,000 rows are read.
        tokenizer: the models' tokenizer.
        length: tokens of each document.
        limit: maximum number of documents.
        column: the text column of rows.
        begin: whether each document begins with the tokenizer's begin-of-text token, if it has one. Not so for an
            encoder, whose metrics put the tokenizer's special tokens around the text.

    Raises:
        OptionError: a length below 2 tokens, or fewer than 2 documents.
        DataError: as `check_paths`, a file is empty or of an unknown type, a data set cannot be reached, a row has no
            text, or there are fewer than two documents of that length, including joined ones.
        MissingDependencyError: a parquet file or a data set needs the package datasets.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> read_documents(["a long text", "no", "another one"], byte_tokenizer(), length=8, limit=9).names
        ('text 0', 'text 2')
    """
    check_paths(source)
    for name, value, least in (("length", length, 2), ("documents", limit, 2)):
        if value < least:
            raise OptionError(f"{name} is a whole number of at least {least}, got {value!r}.")
    numbers = count()
    stream = partial(stream_documents, tokenizer=tokenizer, length=length, limit=limit, column=column, begin=begin)
    if source is None:
        documents: Iterable[Document] = python_corpus().held_out
        source_name: str | None = "sources of this Python's standard library and pydoc's topics, held-out part"
    elif isinstance(source, str | Path):
        documents, source_name = _of_paths([Path(source)], column, stream), public_name(source)
    else:
        rows = islice(source, None if isinstance(source, Sized) else _MOST_ROWS)
        first = list(islice(rows, 1))
        if not first:
            raise DataError("0 texts: there is no document to measure on.")
        if isinstance(first[0], Path):
            first += rows
        if all(isinstance(item, Path) for item in first):
            documents, source_name = _of_paths(first, column, stream), ", ".join(map(public_name, first))
        else:
            counted = (row for row, _ in zip(chain(first, rows), numbers, strict=False))
            documents = row_documents(counted, "text", column)
            source_name = f"{len(source)} texts" if isinstance(source, Sized) else None
    cut = cut_documents(documents, tokenizer, length=length, limit=limit, begin=begin)
    if source_name is None:
        source_name = f"the first {next(numbers)} texts"
    return EvalDocuments(source_name, cut.names, cut.tokens, cut.protocol, cut.said)


def text_and_count(text: object, documents: object) -> tuple[Any, int | None]:
    """Return the text to read, and the maximum number of documents or None, from the arguments of a public function.

    Args:
        text: as the source in `read_documents`, or "python" for the running Python's own text; None: not given.
        documents: the maximum number; or, if `text` is None, the text; None: not given.

    Raises:
        OptionError: both are texts.

    Warns:
        DataWarning: neither is a text, and so the running Python's own text is read.

    Example:
        >>> text_and_count("books/", 8), text_and_count(None, "books/")
        (('books/', 8), ('books/', None))
        >>> text_and_count("python", 8)
        (None, 8)
    """
    if getattr(documents, "ndim", 1) == 0:
        documents = documents.item()  # type: ignore[attr-defined]  # a number of numpy or torch
    if documents is None or isinstance(documents, int):
        if text is None:
            warnings.warn(
                "No text was given: this measures on the held-out part of this Python installation's own sources and "
                f'documentation. Give text="books/" (as `read_documents` takes it), or text="{PYTHON}" to say that it '
                "is wanted.",
                DataWarning,
                stacklevel=3,
            )
        return (None if _is_python(text) else text), documents
    if text is not None:
        raise OptionError(
            f"documents is the maximum number of documents if text is given, got {type(documents).__name__}: give all "
            "text as text."
        )
    return (None if _is_python(documents) else documents), None


def _is_python(text: object) -> bool:
    return isinstance(text, str | Path) and str(text) == PYTHON


def check_paths(source: object) -> None:
    """Check that `source` is text, and that its files and folders exist. It is cheap: call it before models are loaded.

    Raises:
        DataError: it is a mapping, or strings that name files; a file or folder does not exist, or a folder holds no
            documents.
        MissingDependencyError: a path is a data set, and the package datasets is not installed.

    Example:
        >>> check_paths(["a text, and no path"])
    """
    if isinstance(source, Mapping):
        keys = ", ".join(map(repr, source))
        raise DataError(f"the text is a {type(source).__name__} of {keys}: give what is under one of these names.")
    sources = [Path(source)] if isinstance(source, str | Path) else source if isinstance(source, list | tuple) else []
    if sources and all(isinstance(item, str) and os.path.isfile(item) for item in sources):
        raise DataError(
            f"the text is {len(sources)} strings that name files, from {sources[0]!r} on, and strings in a list are "
            "texts themselves: give Path(...) of each to read the files."
        )
    for path in (item for item in sources if isinstance(item, Path)):
        if hub_text(path) is not None:
            require_datasets()
        else:
            files_below(path)


def _of_paths(paths: Iterable[Path], column: str, stream: Callable[[HubText], list[Document]]) -> list[Document]:
    documents: list[Document] = []
    for path in paths:
        if (source := hub_text(path)) is not None:
            documents += stream(source)
        else:
            for file in files_below(path):
                documents += [_public(document, path) for document in file_documents(file, column)]
    return documents


def _public(document: Document, root_path: Path) -> Document:
    """Return `document` with a name relative to the given path, without the folders above it."""
    path, root = Path(document.name), expand_home(root_path)
    below = path.is_relative_to(root) and path != root
    name = (Path(root.resolve().name) / path.relative_to(root)).as_posix() if below else public_name(document.name)
    return Document(name, document.text)
