"""The documents of a source, what identifies them, and progress lines while many of them are tokenized."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache

from hf_posswap.errors import ConfigError
from hf_posswap.text.documents import (
    GIVE,
    TEXT_FILES,
    file_documents,
    files_below,
    hub_documents,
    hub_text,
    require_datasets,
)
from hf_posswap.text.stdlib import PYTHON, Document, python_corpus
from hf_posswap.training.data.settings import DataSettings, Source

SPLITS = ("train", "validation", "test")
"""Splits of a data set to take, in this order, if none is named."""
Say = Callable[[str], None]
_QUIET_SECONDS = 10.0
_HUB_SECONDS = 100.0
"""Most seconds of a request for the commit of a data set; datasets waits as long."""
_COMMITS: dict[str, str] = {}
"""The commits of data sets that this process reads: one each, so that all parts of a run read the same documents."""
_MUCH_PADDING = 0.1
"""Share of the windows from which a line reports it."""
_LEFT_OUT = {
    "documents_too_short": "documents shorter than min_tokens",
    "documents_not_read": "documents by upsample",
    "without_loss": "rows without a token that the loss counts",
    "windows_without_loss": "windows without a token that the loss counts",
    "tokens_truncated": "tokens of chats beyond a window",
}
_NOTES = {
    "diverging_prompts": "for {count} of its prompts, the prompt's tokens are not the first ones of prompt and "
    "completion: there the completion begins where they diverge. End prompts at a token's end, such as before a space",
    "unstopped": "in {count} of its chats, the token after the assistant's text is not counted, so that the model may "
    "not learn to stop: put it into the {{% generation %}} block of the chat template",
}


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


def source_documents(
    source: Source, *, chats: bool = False, commit: str | None = None
) -> Iterator[tuple[Document, bool | None]]:
    """Yield each document of `source`, and whether it is held out; None: not decided by the source.

    The Python corpus holds out the documents on which models are measured by default.

    Args:
        source: of the documents.
        chats: whether a row without text may be a `Chat`; otherwise it is refused.
        commit: of a data set on the Hub; None: the newest one.

    Raises:
        DataError, MissingDependencyError: it cannot be read.
    """
    return islice(_documents(source, chats, commit), source.documents)


def _documents(source: Source, chats: bool, commit: str | None) -> Iterator[tuple[Document, bool | None]]:
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
        pinned = replace(data_set, revision=commit or data_set.revision)
        documents = hub_documents(pinned, column=source.column, splits=SPLITS, streaming=source.streaming, chats=chats)
        yield from ((document, None) for document in documents)
    else:
        for path in files_below(Path(source.path), SPLITS):
            yield from ((document, None) for document in file_documents(path, source.column, chats=chats))


def source_identity(source: Source) -> dict[str, object]:
    """Return what identifies the documents of `source`, as JSON: sizes and times of files, or the commit of a data set.

    The commit is the newest one on the Hub; without a connection, the one in the Hub's cache. Where both are unknown, a
    digest of the documents takes its place.

    Raises:
        DataError: a path does not exist, or the documents of a data set of unknown commit cannot be read.
    """
    identity: dict[str, object] = {"column": source.column, "documents": source.documents}
    if source.path == PYTHON:
        return identity | {"corpus": python_corpus().digest}
    if (data_set := hub_text(source.path)) is not None:
        name = identity["data set"] = str(data_set)
        if name not in _COMMITS:
            revision = data_set.revision
            try:
                sha = HfApi().dataset_info(data_set.name, revision=revision, timeout=_HUB_SECONDS).sha
            except Exception:  # errors of the client's transport are no OSError
                card = try_to_load_from_cache(data_set.name, "README.md", repo_type="dataset", revision=revision)
                sha = Path(card).parent.name if isinstance(card, str) else None  # datasets reads the card first
            if sha is not None:
                _COMMITS[name] = sha
        if name in _COMMITS:
            return identity | {"commit": _COMMITS[name]}
        digest = hashlib.sha256()
        for document, _ in source_documents(source, chats=True):
            digest.update(hashlib.sha256(document.text.encode()).digest())
        return identity | {"content": digest.hexdigest()}
    paths = files_below(Path(source.path), SPLITS)
    below = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [(str(path.resolve()), path.stat()) for path in below if path.is_file()]
    return identity | {"files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]}


class TokenizingProgress:
    """Reports the progress of tokenizing documents.

    Args:
        source: of the documents.
        say: shows a line; None: nothing is shown.
        clock: returns the time in seconds.

    Example:
        >>> seconds = iter([0.0, 4.0, 20.0, 22.0])
        >>> progress = TokenizingProgress(Source("python", documents=100), print, lambda: next(seconds))
        >>> progress.count(10, 4000)
        >>> progress.count(40, 40000)
        python: 50 of 100 documents are tokens, 2.5 a second, 44,000 tokens, about 20 s left
        >>> progress.count(40, 40000)
    """

    def __init__(self, source: Source, say: Say | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.say, self.clock = source.path, say, clock
        self.total = None if say is None else count_documents(source)
        self.documents = self.tokens = 0
        self.began = self.shown_at = clock()

    def count(self, documents: int, tokens: int) -> None:
        """Add what was done since the last call, and show a line if it is time for one."""
        self.documents, self.tokens = self.documents + documents, self.tokens + tokens
        now = self.clock()
        if self.say is None or now - self.shown_at < _QUIET_SECONDS:
            return
        self.shown_at = now
        rate = self.documents / (now - self.began)
        total_text, eta_text = "", ""
        if self.total is not None and self.total >= self.documents:
            total_text, eta_text = f" of {self.total:,}", f", about {(self.total - self.documents) / rate:.0f} s left"
        self.say(
            f"{self.name}: {self.documents:,}{total_text} documents are tokens, {rate:,.3g} a second, "
            f"{self.tokens:,} tokens{eta_text}"
        )


def count_documents(source: Source) -> int | None:
    """Return the most documents that `source` can have if that is known without reading them; None otherwise.

    Example:
        >>> count_documents(Source("org/set")), count_documents(Source("org/set", documents=50))
        (None, 50)
    """
    available = None
    if source.path == PYTHON:
        available = len(python_corpus().train) + len(python_corpus().held_out)
    elif hub_text(source.path) is None:
        files = files_below(Path(source.path), SPLITS)
        available = len(files) if all(path.suffix in TEXT_FILES for path in files) else None
    limits = [number for number in (available, source.documents) if number is not None]
    return min(limits, default=None)


def data_notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on each source of a summary of data: what is left out, and what is wrong with its chats.

    Example:
        >>> list(data_notes({"sources": [{"source": "a.jsonl", "without_loss": 1, "tokens_truncated": 0}]}))
        ['a.jsonl: left out: rows without a token that the loss counts (1)']
    """
    for row in summary["sources"]:
        if row.get("padding", 0.0) > _MUCH_PADDING:
            yield (
                f"warning: {row['source']}: {row['padding']:.0%} of the windows are padding, which counts as trained "
                "tokens. A control with shorter windows reads more text: set data.packing to documents in both."
            )
        left_out = [f"{text} ({row[name]:,})" for name, text in _LEFT_OUT.items() if row.get(name)]
        if left_out:
            yield f"{row['source']}: left out: {', '.join(left_out)}"
        for name, text in _NOTES.items():
            if row.get(name):
                yield f"warning: {row['source']}: {text.format(count=row[name])}"
