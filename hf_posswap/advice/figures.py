"""The measured figures that advice rests on, as the package carries them: each with the study that it comes from.

`python -m recipes.studies.figures` writes them from the results of the studies, and a test holds them to these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

FILE = "figures.json"
Against = Literal["sliding window", "control in the window", "base in the window", "same tokens alone"]
_WORDS: dict[str, str] = {
    "sliding window": "read at once, less the {who} sliding window over the same tokens",
    "control in the window": "in the window, less a control that read as many tokens",
    "base in the window": "in the window, less the untouched base",
    "same tokens alone": "the last of {windows} windows after those before it, less the same tokens alone",
}


@dataclass(frozen=True)
class Base:
    """The model that something was measured on.

    Attributes:
        name: of the model.
        kind: "learned", "rope" or "encoder".
        parameters: how many.
        window: its original length, in tokens.
    """

    name: str
    kind: str
    parameters: int
    window: int

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.parameters / 1e6:.1f} M parameters, window {self.window})"


@dataclass(frozen=True)
class Figure:
    """One measured difference of losses, in nats a token: below 0 the subject is better.

    Attributes:
        source: file of the results, from the top of the repository.
        subject: a recipe, or a scheme that nothing was trained for, as the study calls it.
        against: what the subject is held against.
        base: the model that it was measured on.
        windows: of the base's, read at once.
        difference: the subject less the other.
        low: of the 95 % interval over documents; None: the study gives none.
        high: likewise.
        tokens: trained on; 0: nothing was trained.
        documents: read.
        whose: sliding window it is, "base's" or "control's"; "" otherwise.
        remark: what weakens it, "" where nothing is known to.
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

    @property
    def bound(self) -> float:
        """What the difference is at most: the interval's upper end, or itself where there is no interval."""
        return self.difference if self.high is None else self.high

    @property
    def rate(self) -> float:
        """Tokens trained on, for each parameter of the base."""
        return self.tokens / self.base.parameters

    @property
    def finding(self) -> str:
        """What was found, in words."""
        interval = "no interval" if self.low is None else f"{self.low:+.3f} to {self.high:+.3f}"
        read = f"{self.windows} windows " if self.against == "sliding window" else ""
        words = _WORDS[self.against].format(windows=self.windows, who=self.whose)
        return f"{self.difference:+.3f} nats a token ({interval}), {read}{words}"

    @property
    def trained(self) -> str:
        """What was trained, and for how long."""
        return f"{self.subject}, after {self.tokens:,} tokens" if self.tokens else f"{self.subject}, untrained"

    @property
    def where(self) -> str:
        """On what it was measured, and what weakens it."""
        remark = f"; {self.remark}" if self.remark else ""
        return f"on {self.base}, {self.documents} documents{remark}"

    def __str__(self) -> str:
        return f"{self.trained}: {self.finding}, {self.where}"

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as JSON."""
        return {**self.__dict__, "base": dict(self.base.__dict__)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Figure:
        """Return the figure that `to_dict` wrote."""
        return cls(**{**values, "base": Base(**values["base"])})


@cache
def load_figures() -> tuple[Figure, ...]:
    """Return every figure that the package carries.

    Example:
        >>> any(figure.subject == "learned-to-rope" for figure in load_figures())
        True
    """
    text = files("hf_posswap.advice").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(Figure.from_dict(values) for values in json.loads(text)["figures"])


def figures_of(
    subject: str, against: Against | None = None, *, kind: str | None = None, trained: bool | None = None
) -> list[Figure]:
    """Return the figures of a recipe or scheme, those of more windows first.

    Args:
        subject: as a study calls it.
        against: only those held against this.
        kind: only those measured on bases of this kind.
        trained: only those with training, or without; None: both.

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
