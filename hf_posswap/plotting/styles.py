"""The style of each model and scheme: the same colour and marker in pictures, pages and tables."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """The style of one model.

    Attributes:
        colour: on a light background.
        dark: the colour on a dark background.
        marker: matplotlib's name of the marker.
        path: the marker as SVG path data around (0, 0), about 9 units wide.
        sign: the marker as a character, for text.
    """

    colour: str
    dark: str
    marker: str
    path: str
    sign: str


# Okabe and Ito's colours, safe for colour-blind readers; some are darker to be legible on white.
STYLES = (
    Style("#7a7f85", "#a4abb2", "o", "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", "●"),
    Style("#1d2227", "#f2f4f5", "s", "M-3.6,-3.6H3.6V3.6H-3.6Z", "■"),
    Style("#0072b2", "#4fb3e8", "D", "M0,-5L5,0L0,5L-5,0Z", "◆"),
    Style("#d55e00", "#f08a3c", "^", "M0,-4.8L4.6,3.6H-4.6Z", "▲"),
    Style("#009e73", "#3ecf9f", "v", "M0,4.8L4.6,-3.6H-4.6Z", "▼"),
    Style(
        "#b5599a",
        "#dd8cc4",
        "P",
        "M-1.7,-4.8H1.7V-1.7H4.8V1.7H1.7V4.8H-1.7V1.7H-4.8V-1.7H-1.7Z",
        "✚",
    ),
    Style(
        "#b98a00",
        "#e8bf45",
        "X",
        "M-4.6,-2.3l2.3,-2.3L0,-2.3l2.3,-2.3l2.3,2.3L2.3,0l2.3,2.3l-2.3,2.3L0,2.3l-2.3,2.3l-2.3,-2.3L-2.3,0Z",
        "✖",
    ),
    Style(
        "#3a9bd6",
        "#9ad2f2",
        "*",
        "M0,-5.5L1.3,-1.8L5.2,-1.7L2.1,0.7L3.2,4.5L0,2.2L-3.2,4.5L-2.1,0.7L-5.2,-1.7L-1.3,-1.8Z",
        "★",
    ),
)
SLIDING = len(STYLES) * 1000
"""The number of the sliding-window control, which is not a model: a dashed black line without markers."""
SLIDING_SIGN = "┄"
STROKES = ("solid", "dashed", "dotted", "dashdot")
"""Line styles, one for each time that the styles repeat."""
BASE, CONTROL = 0, 1
"""The numbers of a base and of a control, which have no scheme."""
_SCHEMES = (
    "rope alibi yarn ntk sinusoidal nope linear t5 self_extend learned kerple llama3 ntk_by_parts dynamic p_rope "
    "rerope dual_chunk fire xpos leaky_rerope longrope alibi_interpolated t5_random learned_interpolated string cope"
).split()
"""Schemes by style, those that are often drawn together first."""


def scheme_number(name: str) -> int | None:
    """Return the number of the style of a scheme, the same wherever it is drawn; None: the scheme has none.

    Example:
        >>> scheme_number("rope"), scheme_number("alibi"), scheme_number("linear"), scheme_number("mine")
        (2, 3, 10, None)
    """
    return next(itertools.islice(_scheme_numbers(), _SCHEMES.index(name), None)) if name in _SCHEMES else None


def free_numbers(taken: Collection[int]) -> Iterator[int]:
    """Yield the numbers that models without a scheme's number may have, in order.

    Example:
        >>> list(itertools.islice(free_numbers([2, 4]), 6))
        [3, 5, 6, 7, 10, 11]
    """
    used = frozenset(taken)
    return (number for number in _scheme_numbers() if number not in used)


def distinct_numbers(preferred: Sequence[int | None]) -> list[int]:
    """Return a number for each model, used once: the preferred one, for the first that has it, or a free one.

    Example:
        >>> distinct_numbers([2, None, 3, 2])
        [2, 4, 3, 5]
    """
    preferred_numbers = {number for number in preferred if number is not None}
    free, used, numbers = free_numbers(preferred_numbers), set[int](), []
    for number in preferred:
        numbers.append(next(free) if number is None or number in used else number)
        used.add(numbers[-1])
    return numbers


def _scheme_numbers() -> Iterator[int]:
    """Yield all numbers but those in the colours of a base and a control."""
    return (number for number in itertools.count() if number % len(STYLES) not in (BASE, CONTROL))


def style_of(number: int) -> Style:
    """Return the style of a number; styles repeat with dashed, dotted and dash-dotted lines.

    Example:
        >>> style_of(2).colour, style_of(10) == style_of(2), stroke_of(10)
        ('#0072b2', True, 'dashed')
    """
    return STYLES[number % len(STYLES)]


def stroke_of(number: int) -> str:
    """Return the line style of a number, one of `STROKES`.

    Example:
        >>> [stroke_of(number) for number in (7, 8, 16, 24)]
        ['solid', 'dashed', 'dotted', 'dashdot']
    """
    return STROKES[min(number // len(STYLES), len(STROKES) - 1)]


def sign_of(number: int) -> str:
    """Return the marker of the `number`-th model as a character.

    Example:
        >>> sign_of(0), sign_of(SLIDING)
        ('●', '┄')
    """
    return SLIDING_SIGN if number == SLIDING else style_of(number).sign
