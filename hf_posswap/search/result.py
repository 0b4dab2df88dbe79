"""What a search for LongRoPE found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posswap.schemes import LongRope


@dataclass(frozen=True)
class LongRopeSearch:
    """What `search_longrope` found.

    Attributes:
        scheme: the best, resolved: `patch_model(model, result.scheme)`.
        perplexity: of the documents with it, all tokens but the first of each.
        seeds: the same of the schemes that the search began with, by name.
        log: for each iteration, 0 being the first population: the best perplexity so far.
        evaluations: for each iteration: the candidates measured so far.
        length: tokens of each document.
        documents: how many.
        original_positions: the values of n-hat that were tried.

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

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON."""
        held = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return held | {"scheme": self.scheme.to_dict()}
