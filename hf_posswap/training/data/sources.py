"""The documents of a source, and what identifies them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hf_posswap.errors import ConfigError
from hf_posswap.text.files import GIVE, file_documents, files_below
from hf_posswap.text.hub import hub_documents, hub_text, require_datasets
from hf_posswap.text.stdlib import PYTHON, Document, python_corpus
from hf_posswap.training.data.settings import DataSettings, Source

SPLITS = ("train", "validation", "test")
"""Splits of a data set to take, in this order, if none is named."""


def require_sources(settings: DataSettings) -> None:
    """Refuse settings that name no text.

    Raises:
        ConfigError: there is no source.
    """
    if not settings.sources:
        raise ConfigError(
            "there is no text to train on: give --text books, or data.sources.0.path=books in a recipe and in Python; "
            f"{GIVE}. --text {PYTHON} trains on the sources and documentation of this Python installation."
        )


def check_sources(settings: DataSettings) -> None:
    """Check that there are sources, and that each exists: cheap, so it runs before anything is loaded.

    Raises:
        ConfigError: there is no source.
        DataError: a path does not exist, or a folder holds no documents.
        MissingDependencyError: a source is a data set, and the package datasets is not installed.
    """
    require_sources(settings)
    for source in settings.sources:
        check_source(source)


def check_source(source: Source) -> None:
    """Check that the files of `source` exist, or that `datasets` is installed: cheap, so it runs first.

    Raises:
        DataError: a path does not exist, or a folder holds no documents.
        MissingDependencyError: it is a data set, and the package datasets is not installed.

    Example:
        >>> check_source(Source("python"))
    """
    if source.path == PYTHON:
        return
    if hub_text(source.path) is not None:
        require_datasets()
    elif any(path.is_dir() for path in files_below(Path(source.path), SPLITS)):
        require_datasets()


def source_documents(source: Source, *, chats: bool = False) -> Iterator[tuple[Document, bool | None]]:
    """Yield each document of `source`, and whether it is held out; None: not decided by the source.

    The Python corpus holds out the documents on which models are measured by default.

    Args:
        source: of the documents.
        chats: whether a row without text may be a `Chat`; otherwise it is refused.

    Raises:
        DataError, MissingDependencyError: it cannot be read.
    """
    return islice(_documents(source, chats), source.documents)


def _documents(source: Source, chats: bool) -> Iterator[tuple[Document, bool | None]]:
    if source.path == PYTHON:
        corpus = python_corpus()
        # alternating, so that a limit leaves some of both
        held_out = iter(corpus.held_out)
        stride = max(1, len(corpus.train) // len(corpus.held_out))
        for number, document in enumerate(corpus.train):
            if number % stride == 0 and (held_out_document := next(held_out, None)) is not None:
                yield held_out_document, True
            yield document, False
        yield from ((document, True) for document in held_out)
    elif (data_set := hub_text(source.path)) is not None:
        documents = hub_documents(
            data_set, column=source.column, splits=SPLITS, streaming=source.streaming, chats=chats
        )
        yield from ((document, None) for document in documents)
    else:
        for path in files_below(Path(source.path), SPLITS):
            yield from ((document, None) for document in file_documents(path, source.column, chats=chats))


def source_identity(source: Source) -> dict[str, Any]:
    """Return what identifies the documents of `source`, as JSON: sizes and times of files, or the name of a data set.

    Raises:
        DataError: a path does not exist.
    """
    identity: dict[str, Any] = {"column": source.column, "documents": source.documents}
    if source.path == PYTHON:
        return identity | {"corpus": python_corpus().digest}
    if (data_set := hub_text(source.path)) is not None:
        return identity | {"data set": str(data_set)}
    paths = files_below(Path(source.path), SPLITS)
    below = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [(str(path.resolve()), path.stat()) for path in below if path.is_file()]
    return identity | {"files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]}
