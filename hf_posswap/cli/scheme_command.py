"""Commands that take a scheme: fields that were given in another way are answered with the right one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import typer
from typer.core import TyperCommand

from hf_posswap.errors import OptionError

_USAGE: type[Exception] = typer.BadParameter.__mro__[1]  # UsageError: click's, or typer's own copy of it
_PAIR = re.compile(r"(?:--)?([A-Za-z][\w-]*)=(.+)", re.DOTALL)


class SchemeCommand(TyperCommand):
    """A command whose arguments name a scheme, which may have fields."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _USAGE:
            refuse_other_ways(given)
            raise


def refuse_other_ways(words: list[str]) -> None:
    """Raise where `words` give a scheme, or fields of one, by options of their own.

    Args:
        words: of the command line, such as ["my-llama", "yarn", "--factor", "4"] or [..., "--set", "factor=4"].

    Raises:
        OptionError: with the right way.

    Example:
        >>> try:
        ...     refuse_other_ways(["my-llama", "yarn", "--factor", "4"])
        ... except OptionError as error:
        ...     print(error)
        yarn --factor 4: fields of a scheme are written behind its name; write yarn:factor=4
    """
    from hf_posswap.schemes import SCHEMES
    from hf_posswap.utils.scheme_text import field_kinds

    place = next((number for number, word in enumerate(words) if _name_in(word) in SCHEMES), None)
    if place is None:
        return
    scheme, others = words[place], words[:place] + words[place + 1 :]
    found = list(_fields(others, field_kinds(SCHEMES.get(_name_in(scheme)))))
    if found:
        said = " ".join([scheme, *(words for words, _ in found)])
        joined = ",".join(field for _, field in found)
        right = f"{scheme}{',' if ':' in scheme else ':'}{joined}"
        raise OptionError(f"{said}: fields of a scheme are written behind its name; write {right}")
    if "--scheme" in words:
        raise OptionError(f"--scheme {scheme}: a scheme is given behind the model, without an option: MODEL {scheme}")


def _name_in(word: str) -> str:
    """Return what would be the scheme's name in `word`: "yarn", "yarn:factor=4" or "llama+yarn"."""
    return word.rpartition("+")[2].partition(":")[0]


def _fields(words: list[str], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Return each field that `words` give: as they stand, and as FIELD=VALUE."""
    for number, word in enumerate(words):
        before = "--set " if words[number - 1 : number] == ["--set"] else ""
        pair, after = _PAIR.fullmatch(word), words[number + 1 : number + 2]
        name = (pair[1] if pair else word[2:] if word.startswith("--") else "").replace("-", "_")
        if name in known and pair:
            yield f"{before}{word}", f"{name}={pair[2]}"
        elif name in known and after:
            yield f"{word} {after[0]}", f"{name}={after[0]}"
