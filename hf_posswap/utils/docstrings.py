"""What docstrings say of attributes, each documented once, where it is defined; and that completed for `help()`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap

_WIDTH = 116
_SECTIONS = re.compile(r"(?m)^(?:Attributes|Args|Examples?|Raises|Returns):\s*$")


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
