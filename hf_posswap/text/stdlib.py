"""Text of every Python installation: the standard library's sources and the language's documentation.

It needs no download and raises no licence question: the text is read from the running Python.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hf_posswap.errors import DataError
from hf_posswap.utils.result_views import ResultView

PYTHON = "python"
"""Names this text where a command or an argument takes files, folders and data sets."""
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
_LEAST_BYTES = 1_000_000


@dataclass(frozen=True, repr=False)
class Document(ResultView):
    """One whole text.

    Attributes:
        name: its origin, "stdlib/json/decoder.py" or "topics/lambda".
        text: all of it.
    """

    name: str
    text: str

    def _repr_facts(self) -> dict[str, object]:
        return {"name": self.name, "text": self.text, "characters": len(self.text)}


@dataclass(frozen=True, repr=False)
class Corpus(ResultView):
    """Documents in two disjoint parts.

    Attributes:
        train: training documents, in a fixed pseudo-random order.
        held_out: evaluation documents, in a fixed pseudo-random order.
    """

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    def _repr_facts(self) -> dict[str, object]:
        return {"train": len(self.train), "held_out": len(self.held_out), "digest": self.digest[:16]}

    def _html_rows(self) -> list[tuple[str, str]]:
        splits = {"train": self.train, "held_out": self.held_out}
        return [(name, f"{len(documents)} documents") for name, documents in splits.items()]

    @property
    def digest(self) -> str:
        """SHA-256 of every name and text: two corpora with the same digest are the same."""
        total = hashlib.sha256()
        for documents in (self.train, self.held_out):
            for document in documents:
                total.update(f"{document.name}\0{document.text}\0".encode())
            total.update(b"\1")
        return total.hexdigest()


def python_corpus(stdlib: Path | None = None, *, held_out: float = 0.1) -> Corpus:
    """Return the running Python's own sources and documentation topics, split into two parts.

    Tests, encoding tables and installed packages are skipped; duplicate texts count once.

    Args:
        stdlib: folder of the standard library's sources; None: that of the running Python.
        held_out: share of documents to hold out, between 0 and 1.

    Raises:
        DataError: there is too little text: this Python was installed without its sources.

    Example:
        >>> corpus = python_corpus()
        >>> len(corpus.train) > 4 * len(corpus.held_out) > 40
        True
    """
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    documents = []
    for folder, inner, files in os.walk(root):
        components = Path(folder).relative_to(root).parts
        # not walked: site-packages may hold a hundred times as many files as the standard library
        inner[:] = [name for name in inner if name not in _SKIPPED and (components or not name.startswith("config-"))]
        for name in files:
            if name.endswith(".py") and (text := _read(Path(folder, name))):
                documents.append(Document("/".join(("stdlib", *components, name)), text))
    documents += _topics() if stdlib is None else []
    if (size := sum(len(document.text) for document in documents)) < _LEAST_BYTES:
        raise DataError(
            f"only {size:,} characters of Python source and documentation at {root}, expected {_LEAST_BYTES:,} or "
            "more: this Python comes without its sources. Use another Python, such as one from python.org or uv."
        )
    return split(documents, held_out)


def split(documents: Iterable[Document], held_out: float) -> Corpus:
    """Split `documents` by the hash of their names, so that adding a document moves no other.

    Args:
        documents: documents in any order; of equal texts the first by name is kept.
        held_out: the share to hold out, between 0 and 1.

    Raises:
        DataError: the share is invalid, or one of the parts would be empty.
    """
    if not 0 < held_out < 1:
        raise DataError(f"held_out is a share between 0 and 1, got {held_out}.")
    unique = {document.text: document for document in sorted(documents, key=lambda d: d.name, reverse=True)}
    positioned = sorted((hash_position(document.name), document.name, document) for document in unique.values())
    corpus = Corpus(
        train=tuple(document for position, _, document in positioned if position >= held_out),
        held_out=tuple(document for position, _, document in positioned if position < held_out),
    )
    if not corpus.train or not corpus.held_out:
        raise DataError(
            f"{len(positioned)} documents are too few to hold out a share of {held_out}: one part is empty."
        )
    return corpus


def hash_position(name: str) -> float:
    """Return a number in [0, 1) that depends only on `name`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") / 2**56


def _read(path: Path) -> str:
    """Return the text of `path`, or "" if it is not UTF-8 or not readable."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _topics() -> list[Document]:
    try:
        from pydoc_data.topics import topics  # some distributions package it apart
    except ImportError:
        return []
    return [Document(f"topics/{name}", text) for name, text in topics.items() if text]
