"""Commands that take a scheme, and errors that show the right syntax for its fields."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import typer

from hf_posswap.cli.outcome import OneNameCommand
from hf_posswap.errors import OptionError

_USAGE: type[Exception] = typer.BadParameter.__mro__[1]  # UsageError: click's, or typer's own copy of it
_PAIR = re.compile(r"(?:--)?([A-Za-z][\w-]*)=(.+)", re.DOTALL)


class SchemeCommand(OneNameCommand):
    """A command whose arguments name a scheme, with or without fields."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _USAGE:
            refuse_other_ways(given, sign="+" if self.name == "compare" else " ")
            raise


def refuse_other_ways(arguments: list[str], *, sign: str = "+") -> None:
    """Raise if a scheme or its fields are given as options.

    Args:
        arguments: words of the command line, such as ["my-llama", "yarn", "--factor", "4"] or
            [..., "--set", "factor=4"].
        sign: between a model and a scheme in this command.

    Raises:
        OptionError: shows the right syntax.

    Example:
        >>> try:
        ...     refuse_other_ways(["my-llama", "yarn", "--factor", "4"])
        ... except OptionError as error:
        ...     print(error)
        yarn --factor 4: fields of a scheme are written behind its name; write yarn:factor=4
    """
    from hf_posswap.schemes.base import known_schemes
    from hf_posswap.utils.scheme_text import field_kinds

    known = known_schemes()
    scheme_index = next((number for number, word in enumerate(arguments) if _name_in(word) in known), None)
    if scheme_index is None:
        return
    scheme, others = arguments[scheme_index], arguments[:scheme_index] + arguments[scheme_index + 1 :]
    fields = list(_fields(others, field_kinds(known[_name_in(scheme)])))
    if fields:
        typed = " ".join([scheme, *(source for source, _ in fields)])
        joined = ",".join(field for _, field in fields)
        right = f"{scheme}{',' if ':' in scheme else ':'}{joined}"
        raise OptionError(f"{typed}: fields of a scheme are written behind its name; write {right}")
    if "--scheme" in arguments:
        right = f"MODEL{sign}{scheme.removeprefix('+')}"
        raise OptionError(f"--scheme {scheme}: a scheme is given behind the model, without an option: {right}")


def _name_in(word: str) -> str:
    """Return the possible scheme name in `word`: "yarn", "yarn:factor=4" or "llama+yarn"."""
    return word.rpartition("+")[2].partition(":")[0]


def _fields(arguments: list[str], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each field in `arguments`: as typed, and as FIELD=VALUE."""
    for number, word in enumerate(arguments):
        prefix = "--set " if arguments[number - 1 : number] == ["--set"] else ""
        pair, following = _PAIR.fullmatch(word), arguments[number + 1 : number + 2]
        name = (pair[1] if pair else word[2:] if word.startswith("--") else "").replace("-", "_")
        if name in known and pair:
            yield f"{prefix}{word}", f"{name}={pair[2]}"
        elif name in known and following:
            yield f"{word} {following[0]}", f"{name}={following[0]}"
