"""The claims: who says what, which numbers of the trainings it is about, and where these would lie if it is true."""

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
"""Of one seed at one rate, by material and scheme: "curve" [points], "losses" {windows: [N]}, "shares" {length: x}."""
Pair = tuple[Sequence[float], Sequence[float]]
"""What is compared in one seed: `after` less `before`, the means of both."""

LOST = 0.1
"""Share of the needles found in the window by which fewer must be found beyond it to say that they are not found."""
LEARNED = {"needles": 0.9, "copy": 0.9, "sorting": 0.9}
"""Shares that must be right inside the window or the trained lengths: before that nothing is said of what is beyond."""
ANSWERED = 0.9
"""Share that must be right beyond the trained lengths to say that a task is answered there."""
FAR = ("2", "4", "8")
"""Windows read at once."""
INSIDE = "inside"
BEYOND = "beyond"
"""Mean shares over the lengths of training, and over those up to twice the longest."""


@dataclass(frozen=True)
class Part:
    """One number that a claim is about.

    Attributes:
        what: it is.
        region: where it lies if the claim is true.
        pair: what it is in one seed.
        of: the trainings it is about, by material and scheme.
        over_texts: whether the pair are losses of documents; otherwise of one training each.
    """

    what: str
    region: Region
    pair: Callable[[Measured], Pair]
    of: tuple[tuple[str, str], ...]
    over_texts: bool = False


@dataclass(frozen=True)
class Claim:
    """What somebody says.

    Attributes:
        name: of it here.
        said: in a sentence.
        source: where.
        unit: of its numbers.
        parts: which must all be so.
    """

    name: str
    said: str
    source: str
    unit: str
    parts: tuple[Part, ...]


def _curves(quick: str, slow: str, of: Measured) -> Pair:
    return of["text"][slow]["curve"], of["text"][quick]["curve"]


def _ends(first: str, second: str, of: Measured) -> Pair:
    return of["text"][first]["losses"]["1"], of["text"][second]["losses"]["1"]


def _longer(scheme: str, windows: str, of: Measured) -> Pair:
    return of["text"][scheme]["losses"]["1"], of["text"][scheme]["losses"][windows]


def _farther(scheme: str, windows: str, of: Measured) -> Pair:
    shares = of["needles"][scheme]["shares"]
    return [shares["1"]], [shares[windows]]


def _beyond(task: str, scheme: str, rival: str | None, of: Measured) -> Pair:
    return [of[task][rival]["shares"][BEYOND] if rival else 0.0], [of[task][scheme]["shares"][BEYOND]]


def _reads_on(name: str, scheme: str, label: str, source: str) -> Claim:
    parts = [
        Part(
            f"{m} windows at once less one by one",
            Region(high=MARGIN),
            partial(_longer, scheme, m),
            (("text", scheme),),
            over_texts=True,
        )
        for m in FAR
    ]
    return Claim(name, f"{label} reads beyond its window at no worse a loss", source, "nats", tuple(parts))


def _outdoes(task: str) -> Claim:
    rivals = ("learned", "sinusoidal", "rope", "alibi")
    parts = [
        Part(
            f"nope less {rival}",
            Region(low=0.0),
            partial(_beyond, task, "nope", rival),
            ((task, "nope"), (task, rival)),
        )
        for rival in rivals
    ]
    said = f"NoPE generalises in length better than the others: {task}"
    return Claim(f"nope, {task}", said, _KAZEMNEJAD, "share of answers beyond the trained lengths", tuple(parts))


def _answers(task: str) -> Claim:
    said = f"NoPE answers beyond the trained lengths as it does inside, {ANSWERED:.0%} right: {task}"
    part = Part("nope", Region(low=ANSWERED), partial(_beyond, task, "nope", None), ((task, "nope"),))
    return Claim(f"nope alone, {task}", said, "stronger than the paper", "share of answers", (part,))


_KAZEMNEJAD = "Kazemnejad et al. 2023"
_PRESS = "Press et al. 2022"
CLAIMS = (
    Claim(
        "rope converges",
        "RoPE converges faster than sinusoidal and learned positions",
        "Su et al. 2021, figure 3",
        "nats, mean over the training",
        tuple(
            Part(
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
            Part(
                "learned less sinusoidal, in the window",
                Region(-MARGIN, MARGIN),
                partial(_ends, "sinusoidal", "learned"),
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
            Part(
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
    """Return the claim as JSON: its parts with their intervals and verdicts, and the verdict on all of it.

    Args:
        claim: of `CLAIMS`.
        seeds: what was measured, of each seed.
        elsewhere: of one seed, at another learning rate: as much as was trained there.
    """
    parts = [{"what": part.what} | _judged(part, seeds, elsewhere) for part in claim.parts]
    said = {"claim": claim.name, "said": claim.said, "source": claim.source, "unit": claim.unit}
    return said | {"parts": parts, "verdict": joined([part["verdict"] for part in parts])}


def _judged(part: Part, seeds: Sequence[Measured], elsewhere: Measured) -> dict[str, Any]:
    pairs = [part.pair(of) for of in seeds]
    there = all(scheme in elsewhere.get(material, {}) for material, scheme in part.of)
    other = _difference(part.pair(elsewhere)) if there else None
    return judged(part.region, _interval(part, pairs), other, _not_learned(part, seeds))


def _interval(part: Part, pairs: Sequence[Pair]) -> Interval:
    if part.over_texts:
        return over_both(np.array([before for before, _ in pairs]), np.array([after for _, after in pairs]))
    return over_seeds([_difference(pair) for pair in pairs])


def _difference(pair: Pair) -> float:
    before, after = pair
    return float(np.mean(after) - np.mean(before))


def _not_learned(part: Part, seeds: Sequence[Measured]) -> str:
    """Return which training has not learned what is asked, in the mean over seeds; "": none, or text is read."""
    for material, scheme in part.of:
        if material in LEARNED:
            inside = "1" if material == "needles" else INSIDE
            found = float(np.mean([of[material][scheme]["shares"][inside] for of in seeds]))
            if found < LEARNED[material]:
                return f"{scheme} has not learned it: {found:.0%} right inside"
    return ""
