"""The measured figures behind the advice, each with its study.

`python -m recipes.studies.figures` writes them from the results of the studies, and a test checks that they agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from hf_posswap.utils.result_views import ResultView

FILE = "figures.json"
Against = Literal["sliding window", "control in the window", "base in the window", "same tokens alone"]
_COMPARISONS: dict[str, str] = {
    "sliding window": "read at once, minus the {who} sliding window over the same tokens",
    "control in the window": "in the window, minus a control that read as many tokens",
    "base in the window": "in the window, minus the untouched base",
    "same tokens alone": "the last of {windows} windows after those before it, minus the same tokens alone",
}


@dataclass(frozen=True)
class Base:
    """The base model of a measurement.

    Attributes:
        name: the model's name.
        kind: "learned", "rope" or "encoder".
        parameters: number of parameters.
        window: original length in tokens.
    """

    name: str
    kind: str
    parameters: int
    window: int

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.parameters / 1e6:.1f} M parameters, window {self.window})"


@dataclass(frozen=True, repr=False)
class Figure(ResultView):
    """One measured difference of losses, in nats per token; negative if the subject is better.

    Attributes:
        source: file of the results, relative to the repository.
        subject: a recipe, or a scheme without training, as named in the study.
        against: the baseline.
        base: the measured model.
        windows: number of the base's windows read at once.
        difference: loss of the subject minus that of the baseline.
        low: lower end of the 95 % interval over documents, or None.
        high: upper end of the interval, or None.
        tokens: number of training tokens; 0: no training.
        documents: number of documents.
        whose: owner of the sliding window, "base's" or "control's"; "" otherwise.
        remark: a known limitation, or "".
    """

    source: str
    subject: str
    against: Against
    base: Base
    windows: int
    difference: float
    low: float | None
    high: float | None
    tokens: int
    documents: int
    whose: str = ""
    remark: str = ""

    def _repr_facts(self) -> dict[str, Any]:
        names = ("subject", "against", "difference", "low", "high", "windows", "tokens", "documents")
        return {name: getattr(self, name) for name in names} | {"base": self.base.name}

    @property
    def bound(self) -> float:
        """The upper end of the interval, or the difference itself without an interval."""
        return self.difference if self.high is None else self.high

    @property
    def rate(self) -> float:
        """Training tokens per parameter of the base."""
        return self.tokens / self.base.parameters

    @property
    def finding(self) -> str:
        """The result as text."""
        interval = "no interval" if self.low is None else f"{self.low:+.3f} to {self.high:+.3f}"
        windows_text = f"{self.windows} windows " if self.against == "sliding window" else ""
        comparison = _COMPARISONS[self.against].format(windows=self.windows, who=self.whose)
        return f"{self.difference:+.3f} nats a token ({interval}), {windows_text}{comparison}"

    @property
    def trained(self) -> str:
        """The subject and its number of training tokens as text."""
        return f"{self.subject}, after {self.tokens:,} tokens" if self.tokens else f"{self.subject}, untrained"

    @property
    def where(self) -> str:
        """The base, the documents and the limitation as text."""
        remark = f"; {self.remark}" if self.remark else ""
        return f"on {self.base}, {self.documents} documents{remark}"

    def __str__(self) -> str:
        return f"{self.trained}: {self.finding}, {self.where}"

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as JSON data."""
        return {**self.__dict__, "base": dict(self.base.__dict__)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Figure:
        """Restore a figure from `to_dict`."""
        return cls(**{**values, "base": Base(**values["base"])})


@cache
def load_figures() -> tuple[Figure, ...]:
    """Return all figures in the package.

    Example:
        >>> any(figure.subject == "learned-to-rope" for figure in load_figures())
        True
    """
    text = files("hf_posswap.advice").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(Figure.from_dict(values) for values in json.loads(text)["figures"])


def figures_of(
    subject: str, against: Against | None = None, *, kind: str | None = None, trained: bool | None = None
) -> list[Figure]:
    """Return the figures of a recipe or scheme, sorted by decreasing number of windows.

    Args:
        subject: the subject as named in the study.
        against: only figures with this baseline.
        kind: only figures on bases of this kind.
        trained: only figures with training, or without; None: both.

    Example:
        >>> [figure.windows for figure in figures_of("learned-to-rope", "sliding window", trained=True)][0]
        8
    """
    return sorted(_matching(subject, against, kind, trained), key=lambda figure: -figure.windows)


def _matching(subject: str, against: str | None, kind: str | None, trained: bool | None) -> Iterator[Figure]:
    for figure in load_figures():
        same = figure.subject == subject and against in (None, figure.against) and kind in (None, figure.base.kind)
        if same and trained in (None, figure.tokens > 0):
            yield figure
