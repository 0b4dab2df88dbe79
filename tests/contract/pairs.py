"""Every pair of a registered scheme and a tiny model, found from the registries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from hf_posswap.schemes import schemes_for
from hf_posswap.testing.contract.checks import CHANGE, NOISE, gap
from hf_posswap.testing.contract.pairs import LONGER, Pair, by_stack, is_one, logits, refusal, words
from tests.contract.models import TINY
from tests.contract.others import ALL, OTHERS
from tests.contract.paired import PAIRED
from tests.contract.rotary_kinds import KINDS_OF_ROTARY
from tests.toys import registration

__all__ = [
    "CHANGE",
    "DAILY_PAIRED",
    "FEW",
    "KINDS",
    "LONGER",
    "NOISE",
    "OF_EACH_SITE",
    "ONE_OF_EACH_SITE",
    "Pair",
    "all_pairs",
    "daily_pairs",
    "daily_schemes",
    "gap",
    "is_daily",
    "logits",
    "own_pairs",
    "pairs_that",
    "refusal",
    "supported_pairs",
    "words",
]


def pairs_that(wanted: Callable[[Pair], bool] = lambda pair: True) -> list[Pair]:
    """Return the pairs, the toys' too; natively expressible ones a second time, inside attention.

    The other families' models meet the schemes of each site alone.

    Args:
        wanted: is asked before a pair is planned, which takes long, and before it is of one stack.
    """
    with registration.registered():
        pairs = [Pair(model, scheme) for model in TINY for scheme in schemes_for("text")]
        pairs += [Pair(model, scheme) for model in ALL if model not in TINY for scheme in daily_schemes(model)]
        inside = [replace(pair, site="attention") for pair in pairs]
        return by_stack([pair for pair in pairs + inside if wanted(pair) and is_one(pair)])


@functools.cache
def all_pairs() -> list[Pair]:
    """Return every pair."""
    return pairs_that()


@functools.cache
def supported_pairs() -> list[Pair]:
    """Return the pairs that can be patched."""
    return [pair for pair in all_pairs() if refusal(pair) is None]


@functools.cache
def daily_pairs() -> list[Pair]:
    """Return the pairs that run points in every run, and those of these that are refused; no other is planned."""
    return pairs_that(is_daily)


KINDS = ("gpt2", "bert", "llama")
"""One model of each kind: every scheme runs every point on it."""
ONE_OF_EACH_SITE = ("sinusoidal", "yarn", "alibi")
"""One scheme of each site: a table's, one that stock rotary modules say, one inside attention."""
DAILY_PAIRED = ("bart",)
"""The encoder-decoder that every scheme runs every point on, the schemes of each site in every run."""
OF_EACH_SITE = ("sinusoidal", "yarn", "rope", "alibi", "self_extend")
"""Schemes that between them use every site and way of attending: they run every point on every model."""


FEW = (*OF_EACH_SITE, "t5", "dynamic")
"""Schemes that between them ask for the positions of keys in every way: by distance, by bucket, by length."""


def daily_schemes(model: str) -> tuple[str, ...]:
    """Return the schemes that run every point on a model outside TINY: of the same kind of model one has them all."""
    if model in DAILY_PAIRED:
        return tuple(
            name for name in schemes_for("text") if name != "longrope"
        )  # a number a pair: its stacks' heads differ
    alike = model in KINDS_OF_ROTARY or (model in PAIRED and model not in DAILY_PAIRED)
    return ONE_OF_EACH_SITE if alike else OF_EACH_SITE


def is_daily(pair: Pair) -> bool:
    """Return whether the pair runs every point in every run; the others do so where the whole contract is asked for."""
    if pair.model in DAILY_PAIRED:
        return pair.site == "auto" and pair.scheme in OF_EACH_SITE
    if pair.model in OTHERS or pair.model in PAIRED:
        return False
    if pair.model in KINDS:
        return True
    return pair.scheme in OF_EACH_SITE if pair.site == "auto" else pair.scheme == "rope"


def own_pairs() -> list[Pair]:
    """Return one pair for each scheme and model of the project's own: no toys, no second site, no other family."""
    toys = {registration.TOY_SCHEME, registration.TOY_MODEL}
    own = [pair for pair in all_pairs() if pair.model in TINY and not toys & {pair.model, pair.scheme}]
    return [pair for pair in own if pair.site == "auto"]
