"""Small tasks with one right answer and a length: copying and sorting, to learn on short ones and ask for longer ones.

Two of those of Kazemnejad et al. 2023 (https://arxiv.org/abs/2305.19466), as they have them: each example stands alone
at positions from 0 on, and the right answer ends where it ends.
"""

from __future__ import annotations

import string
from collections.abc import Callable

import numpy as np

Example = tuple[str, str]
"""What is asked, and the answer with its end."""


def copy(random: np.random.Generator, length: int) -> Example:
    """Return so many letters, to be said again.

    Example:
        >>> question, answer = copy(np.random.default_rng(0), 4)
        >>> question == answer.strip() + "=", len(answer)
        (True, 5)
    """
    letters = "".join(random.choice(list(string.ascii_lowercase), length))
    return f"{letters}=", f"{letters}\n"


def sorting(random: np.random.Generator, length: int) -> Example:
    """Return so many letters, some of them more than once, to be said in the order of the alphabet.

    Example:
        >>> question, answer = sorting(np.random.default_rng(0), 4)
        >>> "".join(sorted(question[:-1])) == answer.strip()
        True
    """
    letters = "".join(random.choice(list(string.ascii_lowercase), length))
    return f"{letters}=", f"{''.join(sorted(letters))}\n"


TASKS: dict[str, Callable[[np.random.Generator, int], Example]] = {"copy": copy, "sorting": sorting}


def examples(task: str, count: int, length: int, seed: int) -> list[Example]:
    """Return `count` examples of one length, which follow from the arguments alone."""
    random = np.random.default_rng((seed, length))
    return [TASKS[task](random, length) for _ in range(count)]
