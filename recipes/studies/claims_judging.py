"""The claims: their sources, the measurements that they concern, and the values that they predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from recipes.studies.algorithms import TASKS
from recipes.studies.measuring import MARGIN
from recipes.studies.verdicts import Interval, Region, joined, judged, over_both, over_seeds

Measured = dict[str, dict[str, dict[str, Any]]]
"""One seed at one rate, by material and scheme: "curve" [points], "losses" {windows: [N]}, "shares" {length: x}."""
Pair = tuple[Sequence[float], Sequence[float]]
"""A comparison in one seed: the mean of `after` minus the mean of `before`."""

LOST = 0.1
"""Drop in the share of needles found, from the window to beyond it, that counts as not found."""
LEARNED = {"needles": 0.9, "copy": 0.9, "sorting": 0.9}
"""Shares that must be right within the window or the trained lengths; otherwise nothing is judged beyond them."""
ANSWERED = 0.9
"""Share that must be right beyond the trained lengths for a task to count as answered there."""
FAR = ("2", "4", "8")
"""Windows read at once."""
INSIDE = "inside"
BEYOND = "beyond"
"""Mean shares over the lengths of training, and over those up to twice the longest."""


@dataclass(frozen=True)
class ClaimPart:
    """One measurement that a claim concerns.

    Attributes:
        what: description.
        region: its predicted values if the claim is true.
        pair: computes it for one seed.
        of: the trainings that it uses, by material and scheme.
        over_texts: whether the pair holds losses of documents; otherwise of one training each.
    """

    what: str
    region: Region
    pair: Callable[[Measured], Pair]
    of: tuple[tuple[str, str], ...]
    over_texts: bool = False


@dataclass(frozen=True)
class Claim:
    """A published claim.

    Attributes:
        name: short name.
        said: the claim, in a sentence.
        source: publication.
        unit: of its numbers.
        parts: measurements that must all agree.
    """

    name: str
    said: str
    source: str
    unit: str
    parts: tuple[ClaimPart, ...]


def _curves(quick: str, slow: str, of: Measured) -> Pair:
    return of["text"][slow]["curve"], of["text"][quick]["curve"]


def _losses(first: tuple[str, str], second: tuple[str, str], of: Measured) -> Pair:
    """Return the losses of two schemes, each in a number of windows."""
    (scheme, windows), (other, others) = first, second
    return of["text"][scheme]["losses"][windows], of["text"][other]["losses"][others]


def _farther(scheme: str, windows: str, of: Measured) -> Pair:
    shares = of["needles"][scheme]["shares"]
    return [shares["1"]], [shares[windows]]


def _beyond(task: str, scheme: str, rival: str | None, of: Measured) -> Pair:
    return [of[task][rival]["shares"][BEYOND] if rival else 0.0], [of[task][scheme]["shares"][BEYOND]]


def _reads_on(name: str, scheme: str, label: str, source: str) -> Claim:
    claim_parts = [
        ClaimPart(
            f"{m} windows at once less one by one",
            Region(high=MARGIN),
            partial(_losses, (scheme, "1"), (scheme, m)),
            (("text", scheme),),
            over_texts=True,
        )
        for m in FAR
    ]
    return Claim(name, f"{label} reads beyond its window at no worse a loss", source, "nats", tuple(claim_parts))


def _outdoes(task: str) -> Claim:
    rivals = ("learned", "sinusoidal", "rope", "alibi")
    claim_parts = [
        ClaimPart(
            f"nope less {rival}",
            Region(low=0.0),
            partial(_beyond, task, "nope", rival),
            ((task, "nope"), (task, rival)),
        )
        for rival in rivals
    ]
    statement = f"NoPE generalises in length better than the others: {task}"
    return Claim(
        f"nope, {task}", statement, _KAZEMNEJAD, "share of answers beyond the trained lengths", tuple(claim_parts)
    )


def _answers(task: str) -> Claim:
    statement = f"NoPE answers beyond the trained lengths as it does inside, {ANSWERED:.0%} right: {task}"
    claim_part = ClaimPart("nope", Region(low=ANSWERED), partial(_beyond, task, "nope", None), ((task, "nope"),))
    return Claim(f"nope alone, {task}", statement, "stronger than the paper", "share of answers", (claim_part,))


_KAZEMNEJAD = "Kazemnejad et al. 2023"
_PRESS = "Press et al. 2022"
CLAIMS = (
    Claim(
        "rope converges",
        "RoPE converges faster than sinusoidal and learned positions",
        "Su et al. 2021, figure 3",
        "nats, mean over the training",
        tuple(
            ClaimPart(
                f"rope less {rival}",
                Region(high=0.0),
                partial(_curves, "rope", rival),
                (("text", "rope"), ("text", rival)),
            )
            for rival in ("sinusoidal", "learned")
        ),
    ),
    Claim(
        "tables end close",
        "sinusoidal and learned positions end nearly the same",
        "Vaswani et al. 2017, table 3, row E",
        "nats",
        (
            ClaimPart(
                "learned less sinusoidal, in the window",
                Region(-MARGIN, MARGIN),
                partial(_losses, ("sinusoidal", "1"), ("learned", "1")),
                (("text", "sinusoidal"), ("text", "learned")),
                over_texts=True,
            ),
        ),
    ),
    _reads_on("alibi, loss", "alibi", "ALiBi", _PRESS),
    Claim(
        "alibi, needles",
        "ALiBi does not find beyond its window what it finds in it",
        "widely said; not in the paper",
        "share of needles",
        tuple(
            ClaimPart(
                f"found at {m} windows less in the window",
                Region(high=-LOST),
                partial(_farther, "alibi", m),
                (("needles", "alibi"),),
            )
            for m in FAR
        ),
    ),
    *(claim for task in TASKS for claim in (_outdoes(task), _answers(task))),
    _reads_on("nope, loss", "nope", "NoPE", "asked here; the paper has tasks alone"),
)


def judge(claim: Claim, seeds: Sequence[Measured], elsewhere: Measured) -> dict[str, Any]:
    """Return the claim as JSON: its parts with their intervals and verdicts, and the overall verdict.

    Args:
        claim: of `CLAIMS`.
        seeds: the measurements of each seed.
        elsewhere: the measurements of one seed at another learning rate, as far as it was trained there.
    """
    judged_parts = [{"what": claim_part.what} | _judged(claim_part, seeds, elsewhere) for claim_part in claim.parts]
    header = {"claim": claim.name, "said": claim.said, "source": claim.source, "unit": claim.unit}
    return header | {"parts": judged_parts, "verdict": joined([claim_part["verdict"] for claim_part in judged_parts])}


def _judged(claim_part: ClaimPart, seeds: Sequence[Measured], elsewhere: Measured) -> dict[str, Any]:
    pairs = [claim_part.pair(of) for of in seeds]
    is_available = all(scheme in elsewhere.get(material, {}) for material, scheme in claim_part.of)
    other_rate = _difference(claim_part.pair(elsewhere)) if is_available else None
    return judged(claim_part.region, _interval(claim_part, pairs), other_rate, _not_learned(claim_part, seeds))


def _interval(claim_part: ClaimPart, pairs: Sequence[Pair]) -> Interval:
    if claim_part.over_texts:
        return over_both(np.array([before for before, _ in pairs]), np.array([after for _, after in pairs]))
    return over_seeds([_difference(pair) for pair in pairs])


def _difference(pair: Pair) -> float:
    before, after = pair
    return float(np.mean(after) - np.mean(before))


def _not_learned(claim_part: ClaimPart, seeds: Sequence[Measured]) -> str:
    """Return which training has not learned its task, in the mean over seeds; "" if all have, or read text."""
    for material, scheme in claim_part.of:
        if material in LEARNED:
            inside = "1" if material == "needles" else INSIDE
            share = float(np.mean([of[material][scheme]["shares"][inside] for of in seeds]))
            if share < LEARNED[material]:
                return f"{scheme} has not learned it: {share:.0%} right inside"
    return ""
