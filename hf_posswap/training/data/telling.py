"""How far the tokens of a large source are: a line now and then, none where it is soon done."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hf_posswap.text.files import files_below
from hf_posswap.text.hub import TEXT_FILES, hub_text
from hf_posswap.text.stdlib import python_corpus
from hf_posswap.training.data.settings import PYTHON, Source

Say = Callable[[str], None]
_QUIET_SECONDS = 10.0


class Telling:
    """Tells of documents that are being tokenized.

    Args:
        source: of the documents.
        say: shows a line; None: nothing is said.
        clock: seconds that have passed.

    Example:
        >>> seconds = iter([0.0, 4.0, 20.0, 22.0])
        >>> telling = Telling(Source("python", documents=100), print, lambda: next(seconds))
        >>> telling.count(10, 4000)
        >>> telling.count(40, 40000)
        python: 50 of 100 documents are tokens, 2.5 a second, 44,000 tokens, about 20 s left
        >>> telling.count(40, 40000)
    """

    def __init__(self, source: Source, say: Say | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.say, self.clock = source.path, say, clock
        self.total = None if say is None else count_documents(source)
        self.documents = self.tokens = 0
        self.began = self.said = clock()

    def count(self, documents: int, tokens: int) -> None:
        """Count what has been done since the last call, and say so where it is time."""
        self.documents, self.tokens = self.documents + documents, self.tokens + tokens
        now = self.clock()
        if self.say is None or now - self.said < _QUIET_SECONDS:
            return
        self.said = now
        rate = self.documents / (now - self.began)
        of, left = "", ""
        if self.total is not None and self.total >= self.documents:
            of, left = f" of {self.total:,}", f", about {(self.total - self.documents) / rate:.0f} s left"
        self.say(
            f"{self.name}: {self.documents:,}{of} documents are tokens, {rate:,.3g} a second, {self.tokens:,} tokens"
            f"{left}"
        )


def count_documents(source: Source) -> int | None:
    """Return how many documents `source` has, at most, where that can be told without reading them; None otherwise.

    Example:
        >>> count_documents(Source("org/set")), count_documents(Source("org/set", documents=50))
        (None, 50)
    """
    found = None
    if source.path == PYTHON:
        found = len(python_corpus().train) + len(python_corpus().held_out)
    elif hub_text(source.path) is None:
        files = files_below(Path(source.path))
        found = len(files) if all(path.suffix in TEXT_FILES for path in files) else None
    limits = [number for number in (found, source.documents) if number is not None]
    return min(limits, default=None)
