"""Whether a scheme is for the input of a stack, text or images, for what it has, and for the way that it attends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hf_posswap.errors import SchemeError, UnsupportedSwapError
from hf_posswap.families.sites import Stack
from hf_posswap.schemes.base import Scheme, schemes_for
from hf_posswap.schemes.nope import NoPE

_DOES = {"text": "reads text", "images": "sees images"}
_FOR_TEXT = "rope, alibi, sinusoidal, learned"


def refuse_other_input(model: Any, stack: Stack, scheme: Scheme) -> None:
    """Refuse a `scheme` for text in a `stack` that sees images, and the other way round, and those inside it.

    Raises:
        UnsupportedSwapError: it is; the message says what works.
    """
    for one in _all_in(scheme):
        if stack.inputs not in one.inputs:
            takes, suits = _DOES[stack.inputs], _DOES[one.inputs[0]]
            works = _FOR_TEXT if stack.inputs == "text" else ", ".join(schemes_for("images"))
            raise UnsupportedSwapError(
                f"{one.name} is for a model that {suits}, and {type(model).__name__} {takes}. What works: {works}."
            )
        if stack.inputs == "images" and isinstance(one, NoPE) and one.acts_inside:
            raise UnsupportedSwapError(
                f"{one.name} with logit_scale follows the length of a text, and {type(model).__name__} sees images. "
                "What works: nope by itself."
            )


def refuse_length(model: Any, stack: Stack, scheme: Scheme, max_length: int | None) -> None:
    """Refuse a `max_length` for a `stack` that sees images: its length follows from their size.

    Raises:
        SchemeError: it is given, and is not what follows from the image size of the resolved `scheme`.
    """
    length = scheme.reach(stack.geometry) or stack.geometry.original_length
    if stack.inputs == "images" and max_length not in (None, length):  # records say what follows
        sized = " or give image_size, in pixels," if hasattr(scheme, "image_size") else ""
        raise SchemeError(
            f"{type(model).__name__} sees images: its length follows from their size, {length} tokens here, got "
            f"max_length={max_length}. Leave it out,{sized} images of other sizes run after the swap."
        )


def refuse_no_table(model: Any, stack: Stack, scheme: Scheme) -> None:
    """Refuse a scheme that stands in a position table, or one with such a scheme inside, where the `stack` has none.

    Raises:
        UnsupportedSwapError: it is one, of whatever length.
    """
    tables = [one.table_part for one in _all_in(scheme) if one.table_part is not None]
    if tables and stack.table is None:
        raise UnsupportedSwapError(
            f"{tables[0].name} needs a position table to stand in, and {type(model).__name__} has none. What works: "
            "rope and its scalings, alibi, nope."
        )


def refuse_two_sided(model: Any, stack: Stack, scheme: Scheme) -> None:
    """Refuse a scheme that needs a causal model in a `stack` that sees both sides.

    Raises:
        UnsupportedSwapError: it is one.
    """
    if stack.geometry.causal or not scheme.traits.causal_only or stack.inputs == "images":
        return
    whole = type(model).__name__
    raise UnsupportedSwapError(
        f"{scheme.name} needs a causal model; {f'the {stack.name} of ' if stack.name else ''}{whole} sees both sides. "
        f"What works: {_FOR_TEXT}"
        + (f'; or {{"decoder": "{scheme.name}"}}, which leaves the {stack.name} as it is.' if stack.name else ".")
    )


def _all_in(scheme: Scheme) -> Iterator[Scheme]:
    """Yield `scheme` and every scheme inside it."""
    waiting: list[Any] = [scheme]
    while waiting:
        held = waiting.pop()
        if isinstance(held, Scheme):
            yield held
            waiting += [getattr(held, field.name) for field in dataclasses.fields(held)]
        elif isinstance(held, Mapping):
            waiting += held.values()
        elif isinstance(held, tuple):
            waiting += held
