"""The package does not grow by accident: the numbers of house.json are a ratchet."""

from __future__ import annotations

import ast

import pytest

from tests.house import FILE, KEPT, POINTS, complexity, count_any, improved, measure, problems, read_kept

ADVICE = (
    "Merge what is read together, inline helpers that only forward, type what is Any, or split what branches too much; "
    "a case of the contract that went missing must come back. Where growth is right, raise the number in tests/"
    f"{FILE.name} by hand and say why in the commit. After an improvement: python -m tests.house --write"
)


def test_no_number_of_the_house_gets_worse() -> None:
    worse = problems(measure(), read_kept())
    assert not worse, f"{'; '.join(worse)}. {ADVICE}"


@pytest.mark.parametrize("name", [*KEPT, POINTS])
def test_a_number_that_gets_worse_is_named_and_never_written(name: str) -> None:
    kept = read_kept()
    worse = kept | {name: kept[name] + (-1 if name == POINTS else 1)}
    assert [line.partition(":")[0] for line in problems(worse, kept)] == [name]
    assert improved(worse, kept) == kept
    assert improved(kept, worse) == kept


def test_branches_and_any_are_counted() -> None:
    source = """
def f(a: list[Any], b: int) -> Any:
    for one in a:
        if one: pass
        elif b: pass
    try: pass
    except ValueError: pass
    else: pass
    match b:
        case 1: pass
        case _: pass
"""
    tree = ast.parse(source)
    assert complexity(tree.body[0]) == 7
    assert count_any(tree) == 2
