"""Weighing the candidates: what was measured of each, what speaks against it here, and which comes first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hf_posswap.advice.candidates import CANDIDATES, Candidate
from hf_posswap.advice.case import Case
from hf_posswap.advice.commands import trained_commands, untrained_commands
from hf_posswap.advice.figures import Figure, figures_of
from hf_posswap.advice.serving import Serving, serving_of
from hf_posswap.errors import PosswapError
from hf_posswap.patching.plan.plan_swap import plan_swap

Standing = Literal["better", "level", "worse", "mixed", "not measured", "refused"]
MARGIN = 0.02
"""Nats a token: where a study gives no interval, less than this is no difference."""
_BASES: dict[str, str] = {"learned": "learned", "rope": "rope", "encoder": "encoder"}
_NOT_BETTER = ("level", "mixed", "worse")


@dataclass(frozen=True)
class Option:
    """One thing that can be done, and what speaks for it and against it.

    Attributes:
        title: in words.
        scheme: as commands take it; None: no swap.
        recipe: that trains it; None: nothing is trained.
        standing: against the base's (or its control's) sliding window: "better", "level", "worse", "mixed" over several
            bases, "not measured"; "refused": this model does not take it.
        reasons: the figures that decide, each naming its file.
        against: what keeps it from being advised here; () nothing does.
        unknown: what was not measured.
        route: "native" or "plugin" of the swapped model; "" without a swap.
        serving: what the program that was asked about makes of it; None: none was.
        commands: to go on with; () where it is refused.
        bound: of the deciding figures, nats a token: at most this much above the sliding window.
    """

    title: str
    scheme: str | None
    recipe: str | None
    standing: Standing
    reasons: tuple[Figure, ...] = ()
    against: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    route: str = ""
    serving: Serving | None = None
    commands: tuple[str, ...] = ()
    bound: float = field(default=float("inf"), repr=False)

    @property
    def advised(self) -> bool:
        """Whether figures are for it and nothing is against it."""
        return self.standing == "better" and not self.against

    def to_dict(self) -> dict[str, Any]:
        """Return the option as JSON."""
        plain = {name: value for name, value in self.__dict__.items() if name != "bound"}
        reasons = [figure.to_dict() | {"said": str(figure)} for figure in self.reasons]
        serving = None if self.serving is None else dict(self.serving.__dict__)
        lists = {name: list(getattr(self, name)) for name in ("against", "unknown", "commands")}
        return plain | lists | {"reasons": reasons, "serving": serving}


def weigh(case: Case) -> list[Option]:
    """Return all options with a swap, the best first: advised ones by what they are worth, then the others."""
    found = [_option(case, candidate) for candidate in CANDIDATES[case.kind]]
    order = ["better", "mixed", "level", "not measured", "worse", "refused"]
    return sorted(found, key=lambda one: (not one.advised, order.index(one.standing), one.bound))


def _option(case: Case, candidate: Candidate) -> Option:
    scheme = candidate.scheme(case)
    shared: dict[str, Any] = {"title": candidate.title, "scheme": scheme, "recipe": candidate.recipe}
    try:
        length = None if "factor=" in scheme else case.length
        route = plan_swap(case.model, candidate.plan or scheme, max_length=length).route
    except PosswapError as error:
        return Option(**shared, standing="refused", against=(str(error),))
    decisive = _nearest(case, candidate)
    serving = serving_of(case, candidate.plan or scheme)
    against = [*_budget(case, candidate, decisive), *_serve(serving)]
    make = trained_commands if candidate.recipe else untrained_commands
    trainable = candidate.recipe is None or case.budget > 0
    return Option(
        **shared,
        standing=_standing(decisive),
        reasons=tuple([*decisive, *_beside(case, candidate)]),
        against=tuple(against),
        unknown=_unknown(case, candidate, decisive),
        route=route,
        serving=serving,
        commands=make(case, candidate, serving) if trainable and not candidate.fitted else (),
        bound=max((figure.bound for figure in decisive), default=float("inf")),
    )


def _nearest(case: Case, candidate: Candidate) -> list[Figure]:
    """Return the figures against a sliding window that decide: of each base and each study, those of nearest length."""
    trained = candidate.recipe is not None
    found = figures_of(candidate.subject, "sliding window", kind=_BASES[case.kind], trained=trained)
    nearest: dict[tuple[str, str, str], Figure] = {}
    for figure in found:  # those of more windows first
        key = (figure.source, figure.base.name, figure.whose)
        if key not in nearest or abs(figure.windows - case.windows) < abs(nearest[key].windows - case.windows):
            nearest[key] = figure
    return list(nearest.values())


def _beside(case: Case, candidate: Candidate) -> list[Figure]:
    """Return the figures beside the deciding ones: what the window loses, what far text gives."""
    trained = candidate.recipe is not None
    wanted = ("control in the window", "base in the window", "same tokens alone")
    found = figures_of(candidate.subject, kind=_BASES[case.kind], trained=trained)
    beside = [figure for name in wanted for figure in found if figure.against == name]
    if trained:
        return beside
    return [figure for figure in beside if figure.windows == _closest(case, beside)]


def _closest(case: Case, figures: list[Figure]) -> int:
    return min((figure.windows for figure in figures), key=lambda windows: abs(windows - case.windows), default=0)


def _standing(decisive: list[Figure]) -> Standing:
    stands = {_one(figure) for figure in decisive}
    if not stands:
        return "not measured"
    if len(stands) == 1:
        return stands.pop()
    return "level" if "worse" not in stands and "better" not in stands else "mixed"


def _one(figure: Figure) -> Standing:
    low, high = (figure.low, figure.high) if figure.low is not None else _margin(figure.difference)
    assert low is not None
    assert high is not None
    return "better" if high < 0 else "worse" if low > 0 else "level"


def _margin(difference: float) -> tuple[float, float]:
    return difference - MARGIN, difference + MARGIN


def _budget(case: Case, candidate: Candidate, decisive: list[Figure]) -> list[str]:
    if candidate.recipe is None:
        return []
    needed = needed_tokens(case, decisive or figures_of(candidate.subject, trained=True))
    if not needed:
        return ["it needs training, and of how much nothing was measured"]
    if not case.budget:
        return [
            f"it needs training: with a budget of {needed:,} tokens or more, {needed / case.parameters:.2g} for each "
            "parameter, the least that was measured"
        ]
    if case.budget < needed:
        return [
            f"a budget of {case.budget:,} tokens is {case.budget / case.parameters:.2g} for each parameter; measured "
            f"were {needed / case.parameters:.2g}, which are {needed:,} here"
        ]
    return []


def needed_tokens(case: Case, figures: list[Figure]) -> int:
    """Return how many tokens the least training that was measured is at the size of the model: as many a parameter."""
    least = min((figure.rate for figure in figures if figure.tokens), default=0.0)
    return _rounded(least * case.parameters)


def _rounded(value: float) -> int:
    """Return `value` with two digits."""
    return int(float(f"{value:.1e}"))


def _serve(serving: Serving | None) -> list[str]:
    if serving is None or serving.verdict == "exact":
        return []
    return [str(serving)]


def _unknown(case: Case, candidate: Candidate, decisive: list[Figure]) -> tuple[str, ...]:
    said = []
    held = decisive or figures_of(candidate.subject, kind=_BASES[case.kind], trained=candidate.recipe is not None)
    if not decisive:
        said.append("not measured against a sliding window")
    bases = {figure.base for figure in held}
    if bases:
        most, window = max(base.parameters for base in bases), max(base.window for base in bases)
        if case.parameters > most or case.window > window:
            said.append(
                f"not measured at this size: on models of up to {most / 1e6:.1f} M parameters and windows of up to "
                f"{window} tokens; this one has {case.parameters / 1e6:,.1f} M and {case.window:,}"
            )
    farthest = max((figure.windows for figure in held), default=0)
    if held and case.windows > farthest:
        said.append(f"not measured beyond {farthest} windows: {case.length:,} tokens are {case.windows:.3g}")
    if candidate.recipe and held and case.budget:
        rate, most_rate = case.budget / case.parameters, max(figure.rate for figure in held)
        if rate > 2 * most_rate:
            said.append(
                f"not measured with so many tokens: {_plain(rate)} for each parameter, and {_plain(most_rate)} were "
                "the most"
            )
    return tuple(said)


def _plain(value: float) -> str:
    """Return a number of two significant digits, without an exponent."""
    return f"{float(f'{value:.2g}'):,g}"


def best_of_others(options: list[Option]) -> tuple[Figure, ...]:
    """Return the figures that speak for the sliding window: the best that swaps which do not beat it came to.

    Args:
        options: that were weighed; of those without training and of those with it, one each.
    """
    found: list[Figure] = []
    for trained in (False, True):
        able = [one for one in options if (one.recipe is not None) == trained and one.standing in _NOT_BETTER]
        best = min(able, key=lambda one: one.bound, default=None)
        if best is not None:
            found += [figure for figure in best.reasons if figure.against == "sliding window"]
    return tuple(found)
