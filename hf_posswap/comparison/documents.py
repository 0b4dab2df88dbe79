"""Evaluation documents: from files, a data set, a list, or the running Python's own sources."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.comparison.hub_text import stream_documents
from hf_posswap.comparison.joining import WHOLE, cut_documents
from hf_posswap.errors import DataError, DataWarning, OptionError
from hf_posswap.text.files import file_documents, files_below, row_documents
from hf_posswap.text.hub import HubText, hub_text, require_datasets
from hf_posswap.text.stdlib import PYTHON, Document, python_corpus
from hf_posswap.utils.naming import public_name
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = "text"


@dataclass(frozen=True, repr=False)
class EvalDocuments(ResultView):
    """The first tokens of some documents.

    Attributes:
        source: where they come from, as text.
        names: names of the documents.
        tokens: token ids, [N, L].
        protocol: how documents were cut to rows, as in `hf_posswap.comparison.joining.Cut`.
        said: the protocol as text.
    """

    source: str
    names: tuple[str, ...]
    tokens: np.ndarray
    protocol: str = WHOLE
    said: str = "each is the beginning of one document"

    def _repr_facts(self) -> dict[str, Any]:
        return {"source": self.source, "documents": len(self.names), "tokens": self.tokens, "protocol": self.protocol}

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """A hash of the tokens of each document."""
        return tuple(hashlib.sha256(row.astype("<i8").tobytes()).hexdigest()[:16] for row in self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the documents in results.json."""
        digest = hashlib.sha256("".join(self.digests).encode()).hexdigest()
        protocol = {"id": self.protocol, "said": self.said}
        named = {"source": self.source, "documents": len(self.names), "digest": digest, "names": list(self.names)}
        return named | {"protocol": protocol}


def read_documents(
    source: Any, tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int, column: str = TEXT
) -> EvalDocuments:
    """Return the first `length` tokens of the first `limit` documents; short ones are joined if too few are as long.

    Args:
        source: None: the held-out part of the running Python's own sources and documentation. A path or a list of
            paths: .txt, .md, .rst and .py files are one document each, .jsonl and .json lines and .parquet rows one
            each, folders are read recursively, a folder of `Dataset.save_to_disk` as its rows ("folder:split" of one
            with several splits); "org/name" or "org/name:split" is a data set on the Hub, of which only the needed
            rows are fetched. Otherwise an iterable of strings, or of rows with a text column such as a
            `datasets.Dataset`.
        tokenizer: the models' tokenizer.
        length: tokens of each document.
        limit: maximum number of documents.
        column: the text column of rows.

    Raises:
        OptionError: a length below 2 tokens, or no documents.
        DataError: a file is missing, empty or of an unknown type, a data set cannot be reached, a row has no text, or
            there are fewer than two documents of that length, including joined ones.
        MissingDependencyError: a parquet file or a data set needs the package datasets.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> read_documents(["a long text", "no", "another one"], byte_tokenizer(), length=8, limit=9).names
        ('text 0', 'text 2')
    """
    for name, value, least in (("length", length, 2), ("documents", limit, 1)):
        if value < least:
            raise OptionError(f"{name} is a whole number of at least {least}, got {value!r}.")
    stream = partial(stream_documents, tokenizer=tokenizer, length=length, limit=limit, column=column)
    if source is None:
        documents: list[Document] = list(python_corpus().held_out)
        source_name = "sources of this Python's standard library and pydoc's topics, held-out part"
    elif isinstance(source, str | Path):
        documents, source_name = _of_paths([Path(source)], column, stream), public_name(source)
    else:
        source = list(source)
        if source and all(isinstance(item, Path) for item in source):
            documents, source_name = _of_paths(source, column, stream), ", ".join(map(public_name, source))
        else:
            documents, source_name = list(row_documents(source, "text", column)), f"{len(source)} texts"
    if not documents:
        raise DataError(f"{source_name}: there is no document to measure on.")
    cut = cut_documents(documents, tokenizer, length=length, limit=limit)
    return EvalDocuments(source_name, cut.names, cut.tokens, cut.protocol, cut.said)


def text_and_count(text: Any, documents: Any) -> tuple[Any, int | None]:
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


def _is_python(text: Any) -> bool:
    return isinstance(text, str | Path) and str(text) == PYTHON


def check_paths(source: Any) -> None:
    """Check that the files and folders of `source` exist. It is cheap, so call it before models are loaded.

    Raises:
        DataError: a file or folder does not exist, or a folder holds no documents.
        MissingDependencyError: a path is a data set, and the package datasets is not installed.

    Example:
        >>> check_paths(["a text, and no path"])
    """
    sources = [Path(source)] if isinstance(source, str | Path) else source if isinstance(source, list | tuple) else []
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
