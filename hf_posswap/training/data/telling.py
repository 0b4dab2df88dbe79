"""Progress lines while a large source is tokenized; none if it is done quickly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_posswap.text.files import files_below
from hf_posswap.text.hub import TEXT_FILES, hub_text
from hf_posswap.text.stdlib import PYTHON, python_corpus
from hf_posswap.training.data.settings import Source
from hf_posswap.training.data.sources import SPLITS

Say = Callable[[str], None]
_QUIET_SECONDS = 10.0


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


def data_notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on each source of a summary of data: what is left out, and what is wrong with its chats.

    Example:
        >>> list(data_notes({"sources": [{"source": "a.jsonl", "without_loss": 1, "tokens_truncated": 0}]}))
        ['a.jsonl: left out: rows without a token that the loss counts (1)']
    """
    for row in summary["sources"]:
        left_out = [f"{text} ({row[name]:,})" for name, text in _LEFT_OUT.items() if row.get(name)]
        if left_out:
            yield f"{row['source']}: left out: {', '.join(left_out)}"
        for name, text in _NOTES.items():
            if row.get(name):
                yield f"warning: {row['source']}: {text.format(count=row[name])}"
