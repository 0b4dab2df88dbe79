"""The result of a LongRoPE search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posswap.schemes import LongRope
from hf_posswap.utils.result_views import ResultView


@dataclass(frozen=True, repr=False)
class LongRopeSearch(ResultView):
    """The result of `search_longrope`.

    Attributes:
        scheme: the best scheme, resolved, for `patch_model(model, result.scheme)`.
        perplexity: its perplexity on the documents, over all tokens except the first of each.
        seeds: perplexities of the initial schemes, by name.
        log: the best perplexity after each iteration, starting with the first population.
        evaluations: the number of measured candidates after each iteration.
        length: tokens of each document.
        documents: number of documents.
        original_positions: the tried values of n-hat.

    Example:
        >>> scheme = LongRope(factor=2.0, long_factor=(1.0, 2.0))
        >>> print(LongRopeSearch(scheme, 9.0, {"yarn": 9.5}, (9.5, 9.0), (4, 6), 64, 2, (0,)))
        perplexity 9 after 6 evaluations (yarn 9.5) on 2 documents of 64 tokens
    """

    scheme: LongRope
    perplexity: float
    seeds: dict[str, float]
    log: tuple[float, ...]
    evaluations: tuple[int, ...]
    length: int
    documents: int
    original_positions: tuple[int, ...]

    def __str__(self) -> str:
        seeds = ", ".join(f"{name} {perplexity:.6g}" for name, perplexity in self.seeds.items())
        return (
            f"perplexity {self.perplexity:.6g} after {self.evaluations[-1]} evaluations ({seeds}) on {self.documents} "
            f"documents of {self.length} tokens"
        )

    def _repr_facts(self) -> dict[str, Any]:
        return {
            "perplexity": self.perplexity,
            "factor": self.scheme.factor,
            "seeds": self.seeds,
            "evaluations": self.evaluations[-1],
        }

    def _html_rows(self) -> list[tuple[str, str]]:
        return [
            ("perplexity", f"{self.perplexity:.6g} on {self.documents} documents of {self.length} tokens"),
            *((f"perplexity of {name}", f"{perplexity:.6g}") for name, perplexity in self.seeds.items()),
            ("evaluations", str(self.evaluations[-1])),
            ("scheme", str(self.scheme)),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return values | {"scheme": self.scheme.to_dict()}
