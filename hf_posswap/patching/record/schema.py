"""What a SwapRecord may hold, checked value by value before anything is built from it.

A record comes from a file that anyone may have written. It holds plain JSON with bounds on every side, so that reading
one runs no code, opens no path and allocates nothing.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable
from typing import Any

from hf_posswap.errors import PosswapError, RecordError, UnknownNameError
from hf_posswap.schemes.base import make_scheme, scheme_class
from hf_posswap.schemes.common.places import STRIDE

LONGEST = 2**26
"""The most tokens that a swapped model may be meant for: buffers with one entry a position are made of this length."""
DEEPEST = 10
"""Objects and lists inside one another."""
MOST_VALUES = 2**16
"""Values in one record, in all: a frequency or a factor for each pair of a head, and there are hundreds of them."""
MOST_NESTED = 3
"""Schemes inside one another."""

_LARGEST_WHOLE = 2**63
_TEXT = re.compile(r"[A-Za-z0-9_.,:+= -]{0,128}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def check_record(values: dict[str, Any]) -> None:
    """Check every field of a record but its version.

    Args:
        values: `SwapRecord.to_dict()`, or the value in a file, with exactly the fields of a record.

    Raises:
        RecordError: names the field, its value, and what is expected.
    """
    _check_json(values)
    for name, (good, expected) in _FIELDS.items():
        _need(good(values[name]), name, values[name], expected)
    for name, value in values["original"].items():
        parent, _, leaf = name.rpartition(".")
        known = _ORIGINAL.get(leaf) if not parent or _PART.fullmatch(parent) else None
        if known is None:
            raise RecordError(
                f"config.posswap: original.{name} is no config value that a swap changes; those are "
                f"{', '.join(_ORIGINAL)}."
            )
        _need(known[0](value), f"original.{name}", value, known[1])
    imports = values["imports"] or {}
    _check_scheme(values["scheme"], "scheme", 1, imports)
    for name, scheme in (values["stacks"] or {}).items():
        _check_scheme(scheme, f"stacks.{name}", 1, imports)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST


def _is_image_size(value: Any) -> bool:
    sides = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
    return all(type(side) is int and 1 <= side < STRIDE for side in sides)


def _is_stacks(value: Any) -> bool:
    named = isinstance(value, dict) and bool(value) and set(value) <= {"encoder", "decoder"}
    return named and all(isinstance(scheme, dict) for scheme in value.values())


_Rule = tuple[Callable[[Any], bool], str]
_LENGTH: _Rule = (_is_length, f"a whole number of tokens from 1 to {LONGEST}")
_FIELDS: dict[str, _Rule] = {
    "scheme": (lambda value: isinstance(value, dict), "an object, as Scheme.to_dict writes it"),
    "route": (lambda value: value in ("native", "plugin"), "'native' or 'plugin'"),
    "base_type": (lambda value: isinstance(value, str) and bool(_NAME.fullmatch(value)), "a model type"),
    "max_length": _LENGTH,
    "site": (lambda value: value in ("auto", "attention"), "'auto' or 'attention'"),
    "original": (lambda value: isinstance(value, dict), "an object with the config values that the swap changed"),
    "stacks": (
        lambda value: value is None or _is_stacks(value),
        "an object with the schemes of encoder and decoder, or left out",
    ),
    "imports": (
        lambda value: value is None or (isinstance(value, dict) and all(isinstance(m, str) for m in value.values())),
        "an object with the module of each scheme of another package, or left out",
    ),
    "relative": (lambda value: value in (None, "keep", "drop"), "'keep' or 'drop', or left out"),
}
_PART = re.compile(r"[a-z]\w*(\.[a-z]\w*){0,3}")
"""The path of a config inside the config: text_config."""
_ORIGINAL: dict[str, _Rule] = {
    "max_position_embeddings": _LENGTH,
    "max_target_positions": _LENGTH,
    "max_encoder_position_embeddings": _LENGTH,
    "max_decoder_position_embeddings": _LENGTH,
    "max_seq_len": _LENGTH,
    "image_size": (_is_image_size, "a number of pixels, or height and width, each from 1 to 65535"),
    "relative_attention": (lambda value: isinstance(value, bool), "true or false"),
    "rope_parameters": (lambda value: value is None or isinstance(value, dict), "an object or null"),
}


def _need(good: bool, where: str, value: Any, expected: str) -> None:
    if not good:
        raise RecordError(f"config.posswap: {where} must be {expected}, got {reprlib.repr(value)}.")


def _check_json(record: dict[str, Any]) -> None:
    """Check that `record` is JSON within the bounds, without recursion, at any depth."""
    waiting: list[tuple[str, Any, int]] = [("", record, 1)]
    seen = 0
    while waiting:
        where, value, depth = waiting.pop()
        if depth > DEEPEST:
            raise RecordError(f"config.posswap: {where} lies deeper than {DEEPEST} objects or lists in one another.")
        seen += len(value)
        if seen > MOST_VALUES:
            raise RecordError(f"config.posswap: {where} brings it to more than {MOST_VALUES} values.")
        if isinstance(value, dict):
            _check_keys(where, value)
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if type(child) is float and math.isfinite(child):  # most values: the location is made only for the others
                continue
            location = f"{where}.{key}".lstrip(".") if isinstance(value, dict) else f"{where}[{key}]"
            if isinstance(child, dict | list | tuple):
                waiting.append((location, child, depth + 1))
            else:
                _check_leaf(location, child)


def _check_keys(where: str, value: dict[Any, Any]) -> None:
    for key in value:
        plain = isinstance(key, str) and _TEXT.fullmatch(key) and key and not key.startswith("_")
        _need(bool(plain), f"{where or 'the record'}: each key", key, "a plain name")


def _check_leaf(where: str, value: Any) -> None:
    """Check a value that is neither object nor list."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        _need(-_LARGEST_WHOLE < value < _LARGEST_WHOLE, where, value, "a whole number of at most 63 bits")
    elif isinstance(value, float):
        _need(math.isfinite(value), where, value, "a finite number")
    else:
        plain = isinstance(value, str) and _TEXT.fullmatch(value) and ".." not in value
        _need(bool(plain), where, value, "a number, true, false, null, or a plain word (no path, at most 128 letters)")


def _check_scheme(value: Any, where: str, depth: int, imports: dict[str, str]) -> None:
    """Check `value` and the schemes inside it, the innermost first: each is an object with a `name`."""
    if not isinstance(value, dict | list | tuple):
        return
    named = isinstance(value, dict) and "name" in value
    _need(named or depth > 1, where, value, "a scheme with its name under 'name'")
    if named and depth > MOST_NESTED:
        raise RecordError(f"config.posswap: {where} is a scheme inside more than {MOST_NESTED - 1} others.")
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        _check_scheme(child, f"{where}.{key}", depth + named, imports)
    if not isinstance(value, dict) or not named:
        return
    try:
        scheme_class(value["name"])
        make_scheme(value)
    except UnknownNameError as error:
        module = imports.get(value["name"])
        if module is None:
            advice = "Register a scheme of your own first: import its module, in Python or by posswap --import."
            problem = f"config.posswap: {where} holds a scheme that cannot be built: {error}"
            raise RecordError(problem, advice) from error
        raise RecordError(
            f"config.posswap: {where} is {value['name']!r}, a scheme that the module {module!r} registers.",
            f"Import that module first: `import {module}` in Python, or posswap --import {module} on the command line "
            "(a file by its path). Or, if you trust the code that was saved with the model, load it by "
            "AutoModel.from_pretrained(..., trust_remote_code=True), or the Auto class of its task, in a process that "
            "does not import hf_posswap: hf_posswap itself runs no scheme from a checkpoint.",
        ) from error
    except (PosswapError, TypeError, ValueError, KeyError, OverflowError) as error:  # another package's scheme: any
        raise RecordError(f"config.posswap: {where} holds a scheme that cannot be built: {error}") from error
