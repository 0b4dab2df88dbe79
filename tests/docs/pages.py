"""The documentation as tests read it: pages, fenced blocks with what the comment above them says, links, anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = "README.md"
FOLDER = ".docs/pages"
PAGES = [README, *sorted(f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("*.md"))]
"""The pages, from the root of the repository."""
BESIDE = (
    ".github/CHANGELOG.md",
    ".github/CONTRIBUTING.md",
    "hf_posswap/README.md",
    "hf_posswap/patching/README.md",
    "tests/README.md",
)
"""Texts that the site takes in and that tests hold no blocks of to run."""
_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!-- ([a-z][\w -]*?)(?:: (.+))? -->\n+\Z")
PRINTS = re.compile(r"^example$|\bshown$")
"""Kinds of blocks whose output is the text block below them."""
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TAGS = re.compile(r"<[^>]+>")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: from the root of the repository.
        line: of its fence, counted from 1.
        language: after the fence.
        code: between the fences.
        kind: the word of the comment above it, "" where there is none.
        detail: what the comment says after a colon.
        shown: the text block below an example, or below a command that is shown: what it prints.
    """

    page: str
    line: int
    language: str
    code: str
    kind: str = ""
    detail: str = ""
    shown: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, text: str | None = None) -> Iterator[Block]:
    """Return the fenced blocks of a page in order; `text` in place of its own."""
    text = text_of(page) if text is None else text
    found = list(_FENCE.finditer(text))
    for number, match in enumerate(found):
        comment = _COMMENT.search(text[: match.start()])
        kind, detail = (comment[1], comment[2] or "") if comment else ("", "")
        follows = found[number + 1] if number + 1 < len(found) else None
        shown = ""
        if PRINTS.search(kind) and follows and follows[1] == "text" and not text[match.end() : follows.start()].strip():
            shown = follows[2]
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match[1], match[2], kind, detail, shown)


def blocks(kind: str) -> list[Block]:
    """Return the blocks of all pages whose comment says `kind`."""
    return [block for page in PAGES for block in blocks_of(page) if block.kind == kind]


def prose(text: str) -> str:
    """Return a page's text without its fenced blocks."""
    return _FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Return the targets of the links and pictures of a page, without those to other hosts."""
    return [link for link in _LINK.findall(prose(text)) if "://" not in link and not link.startswith("mailto:")]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as forges and Python-Markdown make them."""
    return {slug(title) for title in re.findall(r"^#{1,6} (.+)$", prose(text), re.MULTILINE)}


def slug(title: str) -> str:
    """Return the anchor of a heading.

    Example:
        >>> slug("`Trainer`, and what a swap costs")
        'trainer-and-what-a-swap-costs'
    """
    words = re.sub(r"[^\w\s-]", "", _TAGS.sub("", title).replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", words)
