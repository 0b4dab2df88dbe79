"""Small tasks with one right answer and a length, copying and sorting: train on short examples, test on longer ones.

Two tasks of Kazemnejad et al. 2023 (https://arxiv.org/abs/2305.19466) in their format: each example is a sequence of
its own at positions from 0, and the answer includes its end.
"""

from __future__ import annotations

import string
from collections.abc import Callable

import numpy as np

Example = tuple[str, str]
"""The question, and the answer with its end."""


def copy(random: np.random.Generator, length: int) -> Example:
    """Return `length` letters, to be repeated.

    Example:
        >>> question, answer = copy(np.random.default_rng(0), 4)
        >>> question == answer.strip() + "=", len(answer)
        (True, 5)
    """
    letters = "".join(random.choice(list(string.ascii_lowercase), length))
    return f"{letters}=", f"{letters}\n"


def sorting(random: np.random.Generator, length: int) -> Example:
    """Return `length` letters, possibly repeated, to be sorted alphabetically.

    Example:
        >>> question, answer = sorting(np.random.default_rng(0), 4)
        >>> "".join(sorted(question[:-1])) == answer.strip()
        True
    """
    letters = "".join(random.choice(list(string.ascii_lowercase), length))
    return f"{letters}=", f"{''.join(sorted(letters))}\n"


TASKS: dict[str, Callable[[np.random.Generator, int], Example]] = {"copy": copy, "sorting": sorting}


def examples(task: str, count: int, length: int, seed: int) -> list[Example]:
    """Return `count` examples of one length, which depend only on the arguments."""
    random = np.random.default_rng((seed, length))
    return [TASKS[task](random, length) for _ in range(count)]
