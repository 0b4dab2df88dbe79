"""Whether a scheme is for what a model takes: text, or images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hf_posswap.errors import SchemeError, UnsupportedSwapError
from hf_posswap.families.sites import Stack
from hf_posswap.schemes.base import IMAGE_SCHEMES, SCHEMES, Scheme
from hf_posswap.schemes.nope import NoPE


def refuse_other_input(model: Any, stack: Stack, scheme: Scheme) -> None:
    """Refuse a `scheme` for text in a `stack` that sees images, and the other way round, and those inside it.

    Raises:
        UnsupportedSwapError: it is; the message says what works.
    """
    wanted, other = (SCHEMES, IMAGE_SCHEMES) if stack.image is None else (IMAGE_SCHEMES, SCHEMES)
    for one in _all_in(scheme):
        if one.name in other and one.name not in wanted:
            takes, suits = ("reads text", "sees images") if stack.image is None else ("sees images", "reads text")
            works = "rope, alibi, sinusoidal, learned" if stack.image is None else ", ".join(IMAGE_SCHEMES)
            raise UnsupportedSwapError(
                f"{one.name} is for a model that {suits}, and {type(model).__name__} {takes}. What works: {works}."
            )
        if stack.image is not None and isinstance(one, NoPE) and one.acts_inside:
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
    if stack.image is not None and max_length not in (None, length):  # records say what follows
        sized = " or give image_size, in pixels," if hasattr(scheme, "image_size") else ""
        raise SchemeError(
            f"{type(model).__name__} sees images: its length follows from their size, {length} tokens here, got "
            f"max_length={max_length}. Leave it out,{sized} images of other sizes run after the swap."
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
