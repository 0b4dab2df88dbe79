"""Reading the package's source for touches of other packages' private names, which belong in hf_posswap/compat."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRIVATE = re.compile(r"_[A-Za-z]\w*")
DOTTED = re.compile(r"\.?(?:\w+\.)*_[A-Za-z]\w*(?:\.\w+)*\.?")
"""A string that is nothing but a dotted name with a private part."""
OURS = {
    *("_posswap", "_posswap_centred", "_posswap_marked"),
    *("_asdict", "_fields", "_make", "_replace", "_current_frames", "_exit"),
}
"""What a swapped model carries; and what Python documents: of named tuples, the frames of threads, os._exit."""
UNDOCUMENTED = {
    "ALL_ATTENTION_FUNCTIONS", "ROPE_INIT_FUNCTIONS", "__class_validators__", "apply_rotary_emb", "base_layer",
    "create_causal_mask", "eager_attention_forward", "get_mask_sizes", "get_objects", "get_query_offset",
    "get_referrers", "no_init_weights", "original_module", "rotate_half", "sdpa_mask",
}  # fmt: skip
"""Names without an underscore that come and go with releases of other packages, or that scan the heap."""
CACHE_ARGUMENTS = {"cache_params", "cache_position", "layer_past", "past_key_value", "past_key_values"}
"""Names that caches have as arguments, in one release or another: a cache is found by its type."""
UNSTABLE = (
    "accelerate.hooks.", "accelerate.state.", "transformers.initialization.", "transformers.masking_utils.",
    "transformers.modeling_rope_utils.", "transformers.modeling_utils.", "transformers.models.auto.",
)  # fmt: skip
"""Modules that no page of their packages documents."""
PER_FAMILY = ("families", "interfaces")
"""Where attention classes of single families are subclassed, each tested for equality with its original."""


@dataclass(frozen=True)
class Source:
    """One module of a package, and the private names that are its own.

    Attributes:
        nodes: all nodes of its tree.
        here: private names that it defines or imports from its package.
        anywhere: private names that its package defines.
        per_family: whether it subclasses the classes of single families.
    """

    nodes: list[ast.AST]
    here: set[str]
    anywhere: set[str]
    per_family: bool


def all_touches(package: Path) -> dict[str, list[str]]:
    """Return what the modules of `package` touch of other packages, by their paths in it; those of compat are left out.

    A name that compat touches is another package's, wherever it is read, written or defined.
    """
    paths = sorted(package.rglob("*.py"))
    nodes = {path.relative_to(package): list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}
    foreign = _foreign([nodes.pop(path) for path in list(nodes) if path.parts[0] == "compat"])
    defined = {path: _defined(held) - foreign for path, held in nodes.items()}
    anywhere = set().union(*defined.values())
    found = {}
    for path, held in nodes.items():
        source = Source(held, defined[path], anywhere, path.parts[:2] == PER_FAMILY)
        lines = [f"{line}: {name}" for line, name in sorted(_touches(source, foreign))]
        if lines:
            found[path.as_posix()] = lines
    return found


def _foreign(compat: list[list[ast.AST]]) -> set[str]:
    """Return the private names that the modules of compat touch and do not define."""
    found = set()
    for nodes in compat:
        defined, silent = _defined(nodes), _silent(nodes)
        speaking = [node for node in nodes if id(node) not in silent]
        names = {node.attr for node in speaking if isinstance(node, ast.Attribute)}
        texts = [node.value for node in speaking if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        names |= {part for text in texts if DOTTED.fullmatch(text) for part in text.split(".")}
        found |= {name for name in names if PRIVATE.fullmatch(name)} - defined
    return found


def _defined(nodes: list[ast.AST]) -> set[str]:
    """Return the private names that a source defines: functions, classes, variables, attributes; or imports."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_itself(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_posswap."):
            found |= {alias.asname or alias.name for alias in node.names}
    return {name for name in found if PRIVATE.fullmatch(name)}


def _silent(nodes: list[ast.AST]) -> set[int]:
    """Return the ids of strings that name nothing: docstrings, ends of names, and texts with values in them."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Expr):
            found.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            found |= {id(part) for part in node.values}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "endswith":
            found |= {id(part) for part in node.args}
    return found


def _touches(source: Source, foreign: set[str]) -> Iterator[tuple[int, str]]:
    silent = _silent(source.nodes)
    for node in source.nodes:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Attribute):
            yield from ((line, name) for name in _of_attribute(node, source))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield from ((line, name) for name in _of_text(node.value, source))
        elif isinstance(node, ast.keyword | ast.arg) and node.arg in CACHE_ARGUMENTS:
            yield line, str(node.arg)
        elif isinstance(node, ast.keyword) and PRIVATE.fullmatch(node.arg or "") and node.arg not in source.anywhere:
            yield line, str(node.arg)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((line, name) for name in _of_import(node, source))
        elif isinstance(node, ast.FunctionDef) and node.name in foreign:
            yield line, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in foreign:
            yield line, node.id


def _of_attribute(node: ast.Attribute, source: Source) -> Iterator[str]:
    itself = _is_itself(node.value)
    if itself and source.per_family:
        return
    own = source.anywhere if itself else source.here
    private = PRIVATE.fullmatch(node.attr) and node.attr not in own | OURS
    written = node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    if private or written or node.attr in UNDOCUMENTED | CACHE_ARGUMENTS:
        yield node.attr


def _is_itself(receiver: ast.expr) -> bool:
    """Return whether an expression is `self`, `cls` or `super(...)`."""
    name = receiver.func if isinstance(receiver, ast.Call) else receiver
    return isinstance(name, ast.Name) and name.id in ("self", "cls", "super")


def _of_text(text: str, source: Source) -> Iterator[str]:
    private = any(PRIVATE.fullmatch(part) and part not in source.here | OURS for part in text.split("."))
    if text in UNDOCUMENTED | CACHE_ARGUMENTS or (private and DOTTED.fullmatch(text)):
        yield text


def _of_import(node: ast.ImportFrom, source: Source) -> Iterator[str]:
    module = str(node.module)
    if module.partition(".")[0] in ("hf_posswap", "__future__") or source.per_family:
        return
    if f"{module}.".startswith(UNSTABLE) or re.search(r"(^|\.)_[a-z]", module):
        yield module
    names = [alias.name for alias in node.names]
    yield from (f"{module}.{name}" for name in names if PRIVATE.fullmatch(name) or name in UNDOCUMENTED)
