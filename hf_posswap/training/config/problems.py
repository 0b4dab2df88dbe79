"""Collects the problems of a recipe, and the keys whose values are unknown because of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        key: the key at fault; "" for the recipe as a whole.
        text: a sentence.
        needs: other keys whose values make it a problem.
    """

    key: str
    text: str
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


@dataclass
class Problems:
    """The problems found so far.

    Attributes:
        entries: all, in order.
        doubted: keys whose values could not be read.
    """

    entries: list[Problem] = field(default_factory=list)
    doubted: set[str] = field(default_factory=set)

    def add(self, key: str, text: str, doubts: str | None = None) -> None:
        """Add a problem of `key`, and mark its value, or that of `doubts`, as unknown."""
        self.entries.append(Problem(key, text))
        self.doubted.add(key if doubts is None else doubts)

    def take(self, problems: list[Problem]) -> None:
        """Add those of `problems` whose values are all known: the others may disappear once earlier ones are fixed.

        Example:
            >>> problems = Problems()
            >>> problems.add("training.max_steps", "expected a whole number, got 'many'.")
            >>> warmup = Problem("training.warmup_steps", "2000 in 1000 steps.", needs=("training.max_steps",))
            >>> problems.take([warmup, Problem("out", "give a folder.")])
            >>> [str(problem) for problem in problems.entries]
            ["training.max_steps: expected a whole number, got 'many'.", 'out: give a folder.']
        """
        self.entries += [problem for problem in problems if all(map(self._is_known, (problem.key, *problem.needs)))]

    def _is_known(self, key: str) -> bool:
        return not any(key == doubted or key.startswith((f"{doubted}.", f"{doubted}[")) for doubted in self.doubted)
