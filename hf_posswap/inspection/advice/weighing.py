"""Ranking of the candidates by their measurements and by what speaks against them for this model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_posswap.errors import PosswapError
from hf_posswap.inspection.advice.candidates import CANDIDATES, Candidate
from hf_posswap.inspection.advice.case import Case, Serving, serving_of
from hf_posswap.inspection.advice.commands import trained_commands, untrained_commands
from hf_posswap.inspection.advice.figures import MOST_TIMES, Figure, Literature, figures_of, literature_of
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.utils.result_views import ResultView

Standing = Literal["literature", "better", "level", "worse", "mixed", "not measured", "refused"]
MARGIN = 0.02
"""Nats per token: without an interval, smaller differences count as none."""
_BASES: dict[str, str] = {"learned": "learned", "rope": "rope", "encoder": "encoder"}
_NOT_BETTER = ("level", "mixed", "worse")


@dataclass(frozen=True, repr=False)
class Option(ResultView):
    """One option, with the reasons for and against it.

    Attributes:
        title: description.
        scheme: the scheme as typed in commands; None: no swap.
        recipe: the training recipe; None: no training.
        standing: compared with the sliding window of the base or its control: "better", "level", "worse", "mixed" over
            several bases, "not measured"; "literature": published for models of this size, for which nothing was
            measured here; "refused": the model does not support it.
        reasons: the decisive figures, each with its file.
        literature: published results on models of this size.
        against: reasons not to recommend it here.
        unknown: what was not measured.
        route: "native" or "plugin"; "" without a swap.
        serving: how the requested program handles it; None without a program.
        commands: the next commands; () if it is refused.
        bound: upper bound of its loss minus that of the sliding window, in nats per token, over the decisive figures.
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
    bound: float = float("inf")
    literature: tuple[Literature, ...] = ()

    def _repr_facts(self) -> dict[str, object]:
        names = ("title", "scheme", "recipe", "standing", "route")
        return {name: getattr(self, name) for name in names} | {"reasons": len(self.reasons)}

    def _html_rows(self) -> list[tuple[str, str]]:
        return [
            ("option", self.title),
            ("standing", self.standing),
            *(("because", f"{reason} [{reason.source}]") for reason in self.grounds),
            *(("against", reason) for reason in self.against),
            *(("not known", note) for note in self.unknown),
            *(("served by", str(self.serving)) for _ in [0] if self.serving),
            *(("command", command) for command in self.commands),
        ]

    @property
    def advised(self) -> bool:
        """Whether it is better than the sliding window, or published for this size, and nothing is against it."""
        return self.standing in ("better", "literature") and not self.against

    @property
    def grounds(self) -> tuple[Literature | Figure, ...]:
        """The published results, then the figures."""
        return (*self.literature, *self.reasons)

    def to_dict(self) -> dict[str, object]:
        """Return the option as JSON data."""
        plain = {name: value for name, value in self.__dict__.items() if name != "bound"}
        reasons = [figure.to_dict() | {"said": str(figure)} for figure in self.reasons]
        literature = [row.to_dict() | {"said": str(row)} for row in self.literature]
        serving = None if self.serving is None else dict(self.serving.__dict__)
        lists = {name: list(getattr(self, name)) for name in ("against", "unknown", "commands")}
        return plain | lists | {"reasons": reasons, "literature": literature, "serving": serving}


def weigh(case: Case) -> list[Option]:
    """Return all options with a swap, best first: recommended ones by their bound, then the others.

    If all measurements are on models more than 10 times smaller and there are published results for this size, those
    decide: then trained options come first if there is a budget, native ones before others.
    """
    candidates = CANDIDATES[case.kind]
    by_literature = extrapolated_times(case) > MOST_TIMES and any(_published(case, each) for each in candidates)
    options = [_option(case, candidate, by_literature=by_literature) for candidate in candidates]
    order = ["literature", "better", "mixed", "level", "not measured", "worse", "refused"]
    return sorted(options, key=lambda option: (*_precedence(case, option), order.index(option.standing), option.bound))


def extrapolated_times(case: Case) -> float:
    """Return how many times larger the model is than the largest one of its kind that was measured; 0: none was."""
    figures = [
        figure
        for candidate in CANDIDATES[case.kind]
        for figure in figures_of(candidate.subject, kind=_BASES[case.kind], trained=candidate.recipe is not None)
    ]
    largest = max((figure.base.parameters for figure in figures), default=0)
    return case.parameters / largest if largest else 0.0


def _published(case: Case, candidate: Candidate) -> tuple[Literature, ...]:
    return literature_of(candidate.subject, case.parameters, is_trained=candidate.recipe is not None)


def _precedence(case: Case, option: Option) -> tuple[bool, bool, bool]:
    """Return a sort key: recommended first; by literature, trained ones first with a budget, and native ones."""
    by_literature = option.standing == "literature"
    return (
        not option.advised,
        by_literature and case.budget > 0 and option.recipe is None,
        by_literature and option.route != "native",
    )


def _option(case: Case, candidate: Candidate, *, by_literature: bool) -> Option:
    scheme = candidate.scheme(case)
    shared: dict[str, Any] = {"title": candidate.title, "scheme": scheme, "recipe": candidate.recipe}
    try:
        length = None if "factor=" in scheme else case.length
        route = plan_swap(case.model, candidate.plan or scheme, max_length=length).route
    except PosswapError as error:
        return Option(**shared, standing="refused", against=(str(error),))
    # decisive are the figures against a sliding window: for each base and study, those of the nearest length
    trained = candidate.recipe is not None
    figures = figures_of(candidate.subject, "sliding window", kind=_BASES[case.kind], trained=trained)
    nearest: dict[tuple[str, str, str], Figure] = {}
    for figure in figures:  # sorted by decreasing number of windows
        key = (figure.source, figure.base.name, figure.whose)
        if key not in nearest or abs(figure.windows - case.windows) < abs(nearest[key].windows - case.windows):
            nearest[key] = figure
    decisive = sorted(nearest.values(), key=lambda figure: -figure.base.parameters)
    published = _published(case, candidate)
    serving = serving_of(case, candidate.plan or scheme)
    against = _published_budget(case, candidate) if by_literature else _budget(case, candidate, decisive)
    if by_literature and not published:
        against.append(f"nothing was published or measured near this size, {case.parameters / 1e6:,.0f} M parameters")
    make = trained_commands if candidate.recipe else untrained_commands
    trainable = candidate.recipe is None or case.budget > 0
    return Option(
        **shared,
        standing="literature" if by_literature and published else _standing(decisive),
        reasons=tuple([*decisive, *_further_figures(case, candidate)]),
        against=(*against, *([] if serving is None or serving.verdict == "exact" else [str(serving)])),
        unknown=(*_unpublished(case, published), *_unknown(case, candidate, decisive)),
        route=route,
        serving=serving,
        commands=make(case, candidate, serving) if trainable and not candidate.fitted else (),
        bound=max((figure.bound for figure in decisive), default=float("inf")),
        literature=published,
    )


def _published_budget(case: Case, candidate: Candidate) -> list[str]:
    """Return what speaks against training where published results decide: only that there is no budget."""
    if candidate.recipe is None or case.budget:
        return []
    tokens = [row.tokens for row in _published(case, candidate) if row.tokens]
    least = f"; published trainings of it took {min(tokens):,} tokens or more" if tokens else ""
    return [f"it needs training, and there is no budget{least}"]


def _unpublished(case: Case, published: tuple[Literature, ...]) -> list[str]:
    """Return where the request goes beyond the published results."""
    if not published:
        return []
    notes = []
    farthest = max(row.windows for row in published)
    if case.windows > farthest:
        notes.append(f"not published beyond {farthest:.3g} windows: {case.length:,} tokens are {case.windows:.3g}")
    tokens = [row.tokens for row in published if row.tokens]
    if case.budget and tokens and case.budget < min(tokens):
        notes.append(f"whether {case.budget:,} tokens are enough: published trainings took {min(tokens):,} or more")
    return notes


def _further_figures(case: Case, candidate: Candidate) -> list[Figure]:
    """Return further figures: the loss within the window, and the gain from far text."""
    trained = candidate.recipe is not None
    wanted = ("control in the window", "base in the window", "same tokens alone")
    figures = figures_of(candidate.subject, kind=_BASES[case.kind], trained=trained)
    further = [figure for name in wanted for figure in figures if figure.against == name]
    if trained:
        return further
    measured = (figure.windows for figure in further)
    closest = min(measured, key=lambda windows: abs(windows - case.windows), default=0)
    return [figure for figure in further if figure.windows == closest]


def _standing(decisive: list[Figure]) -> Standing:
    stands = {_standing_of(figure) for figure in decisive}
    if not stands:
        return "not measured"
    if len(stands) == 1:
        return stands.pop()
    return "level" if "worse" not in stands and "better" not in stands else "mixed"


def _standing_of(figure: Figure) -> Standing:
    low, high = figure.low, figure.high
    if low is None:
        low, high = figure.difference - MARGIN, figure.difference + MARGIN
    assert high is not None
    return "better" if high < 0 else "worse" if low > 0 else "level"


def _budget(case: Case, candidate: Candidate, decisive: list[Figure]) -> list[str]:
    if candidate.recipe is None:
        return []
    # the least measured training in tokens per parameter, scaled to the size of the model, to two significant digits
    figures = decisive or figures_of(candidate.subject, trained=True)
    least = min((figure.rate for figure in figures if figure.tokens), default=0.0)
    needed = int(float(f"{least * case.parameters:.1e}"))
    if not needed:
        return ["it needs training, and the required amount was not measured"]
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


def _unknown(case: Case, candidate: Candidate, decisive: list[Figure]) -> tuple[str, ...]:
    notes = []
    figures = decisive or figures_of(candidate.subject, kind=_BASES[case.kind], trained=candidate.recipe is not None)
    if not decisive:
        notes.append("not measured against a sliding window")
    bases = {figure.base for figure in figures}
    if bases:
        most, window = max(base.parameters for base in bases), max(base.window for base in bases)
        if case.parameters > most or case.window > window:
            notes.append(
                f"not measured at this size: on models of up to {most / 1e6:.1f} M parameters and windows of up to "
                f"{window} tokens; this one has {case.parameters / 1e6:,.1f} M and {case.window:,}"
            )
    farthest = max((figure.windows for figure in figures), default=0)
    if figures and case.windows > farthest:
        notes.append(f"not measured beyond {farthest} windows: {case.length:,} tokens are {case.windows:.3g}")
    if candidate.recipe and figures and case.budget:
        rate, most_rate = case.budget / case.parameters, max(figure.rate for figure in figures)
        if rate > 2 * most_rate:
            notes.append(
                f"not measured with so many tokens: {_plain(rate)} for each parameter, and {_plain(most_rate)} were "
                "the most"
            )
    return tuple(notes)


def _plain(value: float) -> str:
    """Format a number with two significant digits, without an exponent."""
    return f"{float(f'{value:.2g}'):,g}"


def best_of_others(options: list[Option]) -> tuple[Figure, ...]:
    """Return the figures in favour of the sliding window: those of the best options that do not beat it.

    Args:
        options: all options; the best one without training and the best one with training are used.
    """
    figures: list[Figure] = []
    for trained in (False, True):
        matching = [o for o in options if (o.recipe is not None) == trained and o.standing in _NOT_BETTER]
        best = min(matching, key=lambda option: option.bound, default=None)
        if best is not None:
            figures += [figure for figure in best.reasons if figure.against == "sliding window"]
    return tuple(figures)
