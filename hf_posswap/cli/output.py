"""Output of the commands: JSON for programs, tables and text for people. Only these functions write to stdout.

Control characters, as in file names, are escaped so that they cannot affect the terminal: `hf_posswap.utils.printable`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import typer

from hf_posswap.utils.printable import UNSAFE, printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def quiet_library() -> Iterator[None]:
    """Redirect stdout to stderr inside the block, and lower the logging of transformers to warnings.

    Progress bars are shown only if stderr is a terminal. TRANSFORMERS_VERBOSITY is respected.
    """
    from transformers.utils import logging

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_warning()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    with redirect_stdout(sys.stderr):
        yield


def show_json(value: object) -> None:
    """Print `value` as JSON: the only thing that a command with --json prints on stdout."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    typer.echo(UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], text))


def show_text(*lines: str) -> None:
    """Print `lines`, wrapped to the terminal's width, or to 80 columns if there is no terminal."""
    out = console()
    for line in lines:
        out.print(printable(line))


def show_lines(text: str) -> None:
    """Print a text of several lines unchanged, except for escaped control characters."""
    typer.echo(printable_lines(text))


def show_indented(text: str, by: int) -> None:
    """Print `text` indented by `by` columns; wrapped lines are indented by two more, and words are not broken."""
    first, further = " " * by, " " * (by + 2)
    wrapped = textwrap.fill(
        printable(text), console().width, initial_indent=first, subsequent_indent=further, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    typer.echo(wrapped)


def show_command(command: str) -> None:
    """Print a command that can be copied whole; a long one is continued with backslashes, as in a shell."""
    width, lines = console().width - len(_CONTINUATION), [" "]
    arguments = shlex.split(printable(command))
    groups: list[str] = []  # an option with the word after it, which may be its value
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        if previous.startswith("-") and not argument.startswith("-"):
            groups[-1] += f" {_quote(argument)}"
        else:
            groups.append(_quote(argument))
    for group in groups:
        if len(lines[-1]) + 1 + len(group) > width and lines[-1].strip():
            lines.append("   ")
        lines[-1] += f" {group}"
    typer.echo(f"{_CONTINUATION}\n".join(lines))


def _quote(word: str) -> str:
    """Quote a word for a shell; double quotes keep one with single quotes, such as a line of Python, readable."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def show_pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns, or below each other if a name takes more than half of the width."""
    from rich.table import Table

    rows = [(printable(name), printable(value)) for name, value in rows]
    if max((len(name) for name, _ in rows), default=0) > console().width // 2:
        for name, value in rows:
            show_indented(name, 0)
            show_indented(value, 2)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console().print(grid)


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; a cell that does not fit its column is wrapped, never cropped."""
    from rich import box
    from rich.table import Table

    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    out = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False)
    for name, width in zip(cells[0], column_widths(cells, out.width), strict=True):
        table.add_column(name, overflow="fold", width=width)
    for row in cells[1:]:
        table.add_row(*row)
    out.print(table)


_CONTINUATION = " \\"
_GAP = 2  # a column of padding and one of rich's box
_LONG_WORD = 24


def column_widths(rows: Sequence[Sequence[str]], available: int) -> list[int]:
    """Return a width for each column, so that the table fits and words stay whole where possible.

    rich alone breaks columns in the middle of words, and crops them if a minimum width is set.

    Args:
        rows: the cells, including the header.
        available: columns of the terminal, including the gaps between table columns.

    Example:
        >>> column_widths([["name", "what it is"], ["alibi", "a penalty on distance"]], available=20)
        [5, 13]
    """
    columns = list(zip(*rows, strict=True))
    room = max(available - _GAP * (len(columns) - 1), len(columns))
    widths = [min(_LONG_WORD, max(len(word) for cell in column for word in [*cell.split(), " "])) for column in columns]
    wanted = [max(map(len, column)) for column in columns]
    while sum(widths) > room:
        widths[widths.index(max(widths))] -= 1
    missing = [want - width for want, width in zip(wanted, widths, strict=True)]
    for _ in range(room - sum(widths)):
        widest = missing.index(max(missing))
        if missing[widest] > 0:
            widths[widest] += 1
            missing[widest] -= 1
    return widths


def console() -> Console:
    """Return a console on the current stdout that prints text literally, without markup or emoji codes."""
    from rich.console import Console

    return Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
