"""A scheme with fields as one writes it, yarn:factor=4,base=500000; what else is answered with; and fields' docs.

Each field is documented once, in the docstring of the class that defines it; that is completed for `help()`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import textwrap
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from hf_posswap.errors import OptionError, PosswapError
from hf_posswap.utils.printable import brief_repr, printable
from hf_posswap.utils.untrusted import parse_json

SWAP_OPTIONS = ("max_length", "site", "relative")
"""Arguments of `plan_swap` that are not fields of a scheme."""
_NONE = "none"
_TRUTH = {"true": True, "false": False}
_NEXT = re.compile(r",(?=[A-Za-z_]\w*=)")
_FIELD = re.compile(r"([A-Za-z_]\w*)=(.+)", re.DOTALL)
_WIDTH = 116
_SECTIONS = re.compile(r"(?m)^(?:Attributes|Args|Examples?|Raises|Returns):\s*$")


def parse_value(text: str, field_type: Any) -> object:
    """Return the value of type `field_type` that `text` writes.

    Args:
        text: the part after FIELD=.
        field_type: the declared type of a scheme's field: a number, bool, str, Literal, tuple or list of them, None,
            another scheme (its name, or JSON), layers with schemes (JSON), or a union of these; the first member that
            takes the text is used (str is tried last).

    Raises:
        ValueError: `text` is no such value.

    Example:
        >>> parse_value("1,2.5", tuple[float, ...]), parse_value("none", float | None)
        ((1.0, 2.5), None)
    """
    if get_origin(field_type) in (Union, types.UnionType):
        for member_type in sorted(get_args(field_type), key=lambda member: (member is str, member is not type(None))):
            try:
                return parse_value(text, member_type)
            except ValueError:
                continue
        return _no(text)
    if get_origin(field_type) is Literal:
        return (
            {str(value): value for value in get_args(field_type)}[text]
            if text in map(str, get_args(field_type))
            else _no(text)
        )
    if is_scheme(field_type) or is_layers(field_type):
        return _json(text) if text.lstrip().startswith("{") else text if is_scheme(field_type) else _no(text)
    if get_origin(field_type) in (tuple, list):
        return get_origin(field_type)(parse_value(item.strip(), get_args(field_type)[0]) for item in text.split(","))
    if field_type is type(None):
        return None if text.lower() == _NONE else _no(text)
    if field_type is bool:
        return _TRUTH[text.lower()] if text.lower() in _TRUTH else _no(text)
    if field_type in (int, float, str):
        return field_type(text)
    return _no(text)


def is_scheme(field_type: object) -> bool:
    """Return whether a field of type `field_type` holds a scheme."""
    return inspect.isclass(field_type) and hasattr(field_type, "to_dict")


def is_layers(field_type: object) -> bool:
    """Return whether a field of type `field_type` pairs layers with schemes."""
    return get_origin(field_type) is tuple and any(map(is_scheme, get_args(get_args(field_type)[0])))


def _json(text: str) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return _no(text)


def _no(text: str) -> NoReturn:
    raise ValueError(text)


def describe_type(field_type: Any) -> str:
    """Return what `field_type` expects, as text.

    Example:
        >>> describe_type(float | None), describe_type(Literal["half", "interleaved"])
        ('a number or none', 'half or interleaved')
    """
    if get_origin(field_type) in (Union, types.UnionType):
        members = sorted(get_args(field_type), key=lambda member: member is type(None))
        return " or ".join(describe_type(member) for member in members)
    if get_origin(field_type) is Literal:
        return " or ".join(map(str, get_args(field_type)))
    if is_scheme(field_type):
        return 'a scheme, by name or as JSON: {"name": "yarn", "factor": 4}'
    if is_layers(field_type):
        return 'layers and their schemes as JSON: {"0": "nope"}'
    if get_origin(field_type) in (tuple, list):
        return f"a list, with commas, each {describe_type(get_args(field_type)[0])}"
    known = {float: "a number", int: "a whole number", bool: "true or false", str: "text", type(None): _NONE}
    return known.get(field_type, f"{getattr(field_type, '__name__', field_type)} (not to be written as text)")


def field_kinds(cls: type) -> dict[str, object]:
    """Return the declared type of every field of the dataclass `cls`, by name, in order."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def unknown_field(name: str, given: Iterable[object], known: Iterable[str]) -> OptionError:
    """Return the error of fields that the scheme `name` does not have, with near names and the list of all.

    Example:
        >>> print(unknown_field("yarn", ["faktor"], ["factor", "base"]))
        scheme 'yarn' has no field 'faktor'. Did you mean 'factor'? It has: factor, base.
    """
    fields, missing = list(known), list(given)
    near = [
        close
        for name_given in missing
        for close in difflib.get_close_matches(str(name_given), [*fields, *SWAP_OPTIONS], n=1)
    ]
    swap_options = [name_given for name_given in near if name_given in SWAP_OPTIONS and name_given not in fields]
    hint = f" Did you mean {' and '.join(map(repr, near))}?" if near and near != missing else ""
    if swap_options:
        options = ", ".join(
            f"{name_given}=..., on the command line --{name_given.replace('_', '-')}" for name_given in swap_options
        )
        hint += f" Give it as an option: {options}."
    has = ", ".join(fields) or "none"
    return OptionError(f"scheme {name!r} has no field {', '.join(map(repr, missing))}.{hint} It has: {has}.")


def read_fields(name: str, cls: type, text: str) -> dict[str, object]:
    """Return the fields of the scheme `name` that `text` writes: "factor=4,base=500000".

    Raises:
        OptionError: `text` is not FIELD=VALUE,FIELD=VALUE, names no field or one twice, or a value is of another type.

    Example:
        >>> from hf_posswap.schemes import LongRope
        >>> read_fields("longrope", LongRope, "factor=4,long_factor=1,1,2")
        {'factor': 4.0, 'long_factor': (1.0, 1.0, 2.0)}
    """
    field_types, values = field_kinds(cls), dict[str, Any]()
    shown_text = printable(f"{name}:{text}", 200)
    for assignment in _NEXT.split(text):
        match = _FIELD.fullmatch(assignment)
        if match is None:
            raise OptionError(
                f"{shown_text}: {brief_repr(assignment)} is not FIELD=VALUE, such as yarn:factor=4,base=500000."
            )
        field, value = match.groups()
        if field not in field_types:
            raise unknown_field(name, [field], field_types)
        if field in values:
            raise OptionError(f"{shown_text}: {field} is written twice; write each field once.")
        try:
            values[field] = parse_value(value, field_types[field])
        except ValueError:
            expected = describe_type(field_types[field])
            raise OptionError(
                f"{shown_text}: {field} of {name!r} must be {expected}, got {brief_repr(value)}."
            ) from None
    return values


_WORD = r"[A-Za-z_][\w-]*"


_PAIR = re.compile(
    rf"""["']?(?P<field>{_WORD})["']?[\s:=]+  # factor=, "factor":, --factor
         (?P<value>\[[^\]]*\]|["'][^"']*["']|[^\s,;:=()\[\]{{}}"']+(?:,(?!\s*["']?-*{_WORD}["']?\s*[:=])[^\s,;:=()\[\]{{}}"']+)*)""",
    re.VERBOSE,
)


def respelled(text: str, classes: Mapping[str, type]) -> str | None:
    """Return the scheme that `text` seems to mean, in this syntax; None: unknown.

    Args:
        text: such as "yarn(factor=4)", "yarn factor=4", "yarn:factor:4", "yarn --factor 4", or a mapping.
        classes: of all schemes, by name.

    Example:
        >>> from hf_posswap.schemes import SCHEMES
        >>> known = dict(SCHEMES.items())
        >>> respelled("yarn(factor=4, base=500000)", known), respelled('{"name": "yarn", "factor": 4}', known)
        ('yarn:factor=4,base=500000', 'yarn:factor=4')
        >>> respelled("alibi:slopes=0.1;0.2", known)
        'alibi:slopes=0.1,0.2'
    """
    name = next((word for word in re.findall(_WORD, text) if word in classes), None)
    if name is None:
        return None
    rest = text.partition(name)[2].replace(";", ",")  # between numbers, or between fields
    pairs = [(match["field"].lstrip("-").replace("-", "_"), match["value"]) for match in _PAIR.finditer(rest)]
    fields = [f"{field}={_bare(value)}" for field, value in pairs]
    if not fields or not rest:
        return None
    try:
        classes[name](**read_fields(name, classes[name], ",".join(fields)))
    except (PosswapError, TypeError):
        return None
    return f"{name}:{','.join(fields)}"


def _bare(value: str) -> str:
    return ",".join(item.strip() for item in value.strip("[]\"'").split(","))


def scheme_and_fields(text: str, classes: Mapping[str, type]) -> tuple[str, dict[str, object]] | None:
    """Return the name and the fields of the scheme that `text` writes; None: it names no scheme.

    Raises:
        OptionError: as `read_fields`; where the scheme is spelt in another way, the error has the right one.

    Example:
        >>> from hf_posswap.schemes import SCHEMES
        >>> scheme_and_fields("yarn:factor=4", dict(SCHEMES.items()))
        ('yarn', {'factor': 4.0})
    """
    name, colon, fields = text.partition(":")
    try:
        if colon and fields and name in classes:
            return name, read_fields(name, classes[name], fields)
    except OptionError:
        right = respelled(text, classes)
        if right is None or right == text:
            raise
        raise _another(text, right) from None
    word = re.match(_WORD, text)
    right = respelled(text, classes)
    if right is not None:
        raise _another(text, right)
    if word is not None and word[0] in classes and text != word[0]:
        raise OptionError(
            f"{brief_repr(text)}: a scheme with fields is written NAME:FIELD=VALUE,FIELD=VALUE, such as "
            f"yarn:factor=4,base=500000. {word[0]!r} has: {', '.join(field_kinds(classes[word[0]])) or 'no fields'}."
        )
    return None


def _another(text: str, right: str) -> OptionError:
    given = brief_repr(text)
    return OptionError(f"{given}: a scheme with fields is written NAME:FIELD=VALUE,FIELD=VALUE; write {right}")


def attribute_docs(cls: type) -> dict[str, str]:
    """Return what the "Attributes:" sections of the docstrings of `cls` and its bases say, by name.

    Example:
        >>> class Scheme:
        ...     '''A scheme.
        ...
        ...     Attributes:
        ...         factor: how far it
        ...             stretches.
        ...     '''
        >>> attribute_docs(Scheme)
        {'factor': 'how far it stretches.'}
    """
    out: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is not object and base.__dict__.get("__doc__"):
            out |= _entries(_section(inspect.cleandoc(base.__dict__["__doc__"]), "Attributes"))
    return out


def description(cls: type) -> str:
    """Return the docstring of `cls` before its first section."""
    return _SECTIONS.split(inspect.getdoc(cls) or "")[0].strip()


def add_inherited_fields(cls: type) -> None:
    """Complete the "Attributes:" of the docstring of `cls` with the fields of its bases, which are dataclasses.

    Fields are in the order of the constructor, so those of bases come first.

    Example:
        >>> @dataclasses.dataclass
        ... class Base:
        ...     '''A base.
        ...
        ...     Attributes:
        ...         factor: how far.
        ...     '''
        ...     factor: float = 1.0
        >>> class Derived(Base):
        ...     '''A scheme.
        ...
        ...     Example:
        ...         >>> 1
        ...         1
        ...     '''
        >>> add_inherited_fields(Derived)
        >>> print(Derived.__doc__.partition("Example")[0])
        A scheme.
        <BLANKLINE>
        Attributes:
            factor: how far.
        <BLANKLINE>
        <BLANKLINE>
    """
    docstring = cls.__dict__.get("__doc__")
    if not docstring:  # python -OO, or none
        return
    doc = inspect.cleandoc(docstring)
    own_fields = _entries(_section(doc, "Attributes"))
    bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
    fields = [field.name for base in bases for field in dataclasses.fields(base)]
    known = attribute_docs(cls)
    lacking = [name for name in dict.fromkeys(fields) if name in known and name not in own_fields]
    if not lacking:
        return
    lines = "".join(_entry(name, known[name]) + "\n" for name in lacking)
    if own_fields:
        head, rest = doc.split("Attributes:\n", 1)
        cls.__doc__ = f"{head}Attributes:\n{lines}{rest}\n"
        return
    first = _SECTIONS.search(doc)
    head, rest = (doc, "") if first is None else (doc[: first.start()], doc[first.start() :])
    cls.__doc__ = f"{head.rstrip()}\n\nAttributes:\n{lines}" + (f"\n{rest}\n" if rest else "")


def _entry(name: str, text: str) -> str:
    wrapper = textwrap.TextWrapper(
        _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(f"{name}: {text}")


def _section(doc: str, name: str) -> str:
    """Return the indented lines under `name:` in a cleaned docstring."""
    match = re.search(rf"(?m)^{name}:\s*\n((?:[ \t]+.*\n?|\s*\n)*)", doc + "\n")
    return inspect.cleandoc("\n" + match.group(1)) if match else ""


def _entries(section: str) -> dict[str, str]:
    """Return the entries "name: text" of a section; further lines of a text are indented."""
    out: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        start = re.match(r"(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if start:
            name, out[start.group(1)] = start.group(1), start.group(2)
        elif name and line.strip():
            out[name] = f"{out[name]} {line.strip()}"
    return out
