"""`help()` of every public name reads well: each argument and field, what is raised, and an example that runs.

That the examples run and print what they say is tested by the doctests.
"""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re
from typing import Any

import pytest

import hf_posswap
import hf_posswap.families
import hf_posswap.plotting
import hf_posswap.schemes
from hf_posswap.utils.scheme_text import attribute_docs

NAMES = [name for name in hf_posswap.__all__ if name not in ("errors", "__version__")]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(hf_posswap, name))]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(hf_posswap, name))]
RAISE_NOTHING = {"list_families", "list_schemes", "load_example"}


def doc_of(name: str) -> str:
    return inspect.getdoc(getattr(hf_posswap, name)) or ""


def entries(doc: str, section: str) -> set[str]:
    """Return the names that a section of a docstring explains."""
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", doc + "\n", re.MULTILINE)
    lines = found[1].splitlines() if found else []
    return {
        name.strip(" *")
        for line in lines
        if (start := re.match(r"    (\*{0,2}\w[\w*, ]*):", line))
        for name in start[1].split(",")
    }


def test_every_name_is_a_function_or_a_class() -> None:
    assert sorted([*FUNCTIONS, *CLASSES]) == sorted(NAMES)
    assert len(FUNCTIONS) > 30
    assert len(CLASSES) > 35


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_explains_its_arguments_and_errors_and_has_an_example(name: str) -> None:
    function: Any = getattr(hf_posswap, name)
    doc = doc_of(name)
    assert entries(doc, "Args") == set(inspect.signature(function).parameters)
    assert bool(entries(doc, "Raises")) != (name in RAISE_NOTHING)
    assert ">>> " in doc


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_explains_every_field_and_has_an_example_or_says_who_makes_it(name: str) -> None:
    cls: Any = getattr(hf_posswap, name)
    doc = doc_of(name)
    if dataclasses.is_dataclass(cls):
        section, fields = "Attributes", [field.name for field in dataclasses.fields(cls) if field.init]
    else:
        section, fields = "Args", list(inspect.signature(cls).parameters)
    public = [field for field in fields if not field.startswith("_")]
    assert [field for field in public if field not in entries(doc, section)] == []
    makers = [maker for maker in re.findall(r"`(\w+)`", doc.partition("\n")[0]) if maker in FUNCTIONS]
    assert ">>> " in doc or makers, "no example, and no function that makes one"


@pytest.mark.parametrize("name", NAMES)
def test_the_first_line_is_a_sentence(name: str) -> None:
    first = doc_of(name).partition("\n")[0]
    assert first[0].isupper() or first.startswith(("p-RoPE", "xPos", "PE(")), first
    assert first.endswith((".", ":", "`")), first


def test_schemes_name_what_they_take_from_their_bases_in_the_order_of_the_constructor() -> None:
    text = pydoc.render_doc(hf_posswap.Yarn, renderer=pydoc.plaintext)
    section = text.partition("Attributes:")[2].partition("Example:")[0]
    shown = re.findall(r"^ \|      (\w+):", section, re.MULTILINE)
    assert shown == [field.name for field in dataclasses.fields(hf_posswap.Yarn)]
    assert set(attribute_docs(hf_posswap.Yarn)) == set(shown)


@pytest.mark.parametrize("package", [hf_posswap.plotting, hf_posswap.schemes, hf_posswap.families])
def test_functions_for_authors_explain_their_arguments(package: Any) -> None:
    functions = [one for name in package.__all__ if inspect.isfunction(one := getattr(package, name))]
    assert functions
    for function in functions:
        assert entries(inspect.getdoc(function) or "", "Args") == set(inspect.signature(function).parameters), function
