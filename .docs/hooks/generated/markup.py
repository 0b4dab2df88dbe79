"""Markdown's small parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names, each with its description."""
    return "\n".join(f"- **{name}**: {' '.join(text.split())}" for name, text in pairs)


def prose(text: str) -> str:
    """Return a docstring's paragraphs as Markdown: text in backticks is code, all else is literal."""
    pieces = " ".join(text.split()).split("`")
    return "`".join(piece if number % 2 else literal(piece) for number, piece in enumerate(pieces))


def literal(text: str) -> str:
    """Return text with the characters escaped that Markdown would read as its own."""
    for character in "\\`*_<[":
        text = text.replace(character, "\\" + character) if character != "<" else text.replace("<", "&lt;")
    return text


def fenced(text: str, language: str = "text") -> str:
    """Return a block of code."""
    return f"```{language}\n{text.rstrip()}\n```"
