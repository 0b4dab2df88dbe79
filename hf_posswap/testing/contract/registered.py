"""What a module registers: its schemes, its terms of sums, its families."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_posswap.errors import OptionError
from hf_posswap.families import FAMILIES
from hf_posswap.families.base import Family
from hf_posswap.registry import Registry
from hf_posswap.schemes import SCHEMES
from hf_posswap.schemes.base import TERMS
from hf_posswap.utils.user_paths import import_module


@dataclass(frozen=True)
class Registered:
    """The names that a module registers.

    Attributes:
        module: the module, as it was asked for.
        schemes: its schemes, sorted.
        terms: its terms of sums, sorted.
        families: its families, sorted.
    """

    module: str
    schemes: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    families: tuple[str, ...] = ()


def registered_by(module: str) -> Registered:
    """Import a module, and return what it registers, also if it was imported before.

    Args:
        module: the name of a module, or a file that ends in .py.

    Raises:
        OptionError: it cannot be imported, or registers nothing.
    """
    before = [registry.names_so_far() for registry in (SCHEMES, TERMS, FAMILIES)]  # entry points come after the module
    imported = import_module(module).__name__
    now = [registry.names_so_far() for registry in (SCHEMES, TERMS, FAMILIES)]
    new = [there - was for there, was in zip(now, before, strict=True)]
    families = {each.name for each in _values_in(imported) if isinstance(each, Family)} & now[2]
    registered = Registered(
        module,
        schemes=tuple(sorted(new[0] | _defined_in(imported, SCHEMES))),
        terms=tuple(sorted(new[1] | _defined_in(imported, TERMS))),
        families=tuple(sorted(new[2] | families)),
    )
    if not (registered.schemes or registered.terms or registered.families):
        raise OptionError(
            f"{module!r} registers no scheme and no family. Name the module that does so when it is imported, by "
            "SCHEMES.register, by a decorator of hf_posswap.schemes, or by hf_posswap.families.register."
        )
    return registered


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _defined_in(module: str, registry: Registry[Any]) -> set[str]:
    """Return the names of the classes in `registry` that a module or one inside it defines."""
    return {name for name, cls in registry.items() if _is_inside(cls.__module__, module)}


def _values_in(module: str) -> Iterator[Any]:
    """Yield what a module, and those inside it that are imported, hold."""
    for name, held in list(sys.modules.items()):
        if _is_inside(name, module):
            yield from list(vars(held).values())
