"""The code that goes with a plugin checkpoint, so that `trust_remote_code=True` loads it where hf_posswap is missing.

It is the package's own modules: those that `checkpoints/auto.py` imports, directly or not, and those of the scheme and
of the families. transformers only takes a flat folder of relative imports, so `hf_posswap/schemes/rope.py` becomes
`posswap_schemes_rope.py`, its imports of hf_posswap relative; not another character changes.
"""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import family_of
from hf_posswap.schemes.base import scheme_class
from hf_posswap.utils.threads import once
from hf_posswap.versions import tested

ENTRY = "modeling_posswap"
"""Name of the module that config.json names under `auto_map`."""
CONFIG_CLASS = "PosswapConfig"
AUTO_MAP = {"AutoConfig": f"{ENTRY}.{CONFIG_CLASS}"}
"""Only the config: transformers asks it for the model classes, so no model is ever built without its swap."""

_START = "checkpoints.auto"
_HAVE = {"torch", "transformers", "numpy", "safetensors"}  # wherever transformers loads a model
_HERE = Path(__file__).resolve()
_PACKAGE = _HERE.parents[2]
LEAST_TRANSFORMERS = (5, 14)
_HEADER = '''"""Loads this checkpoint where hf_posswap is not installed: from_pretrained(..., trust_remote_code=True).

Made by hf_posswap {version} (Apache License 2.0) from its own modules: the posswap_*.py files are those, with their
imports made relative. Better: pip install hf-posswap, then `import hf_posswap` before from_pretrained; that needs
neither this code nor the flag. Either way: Python 3.11 and transformers {least}, or newer. It was tested with the
versions below; on others it proves itself on a tiny model first, or refuses (POSSWAP_UNTESTED=allow leaves that out).
"""

import transformers

HF_POSSWAP_VERSION = "{version}"
TESTED_VERSIONS = {tested}
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < {numbers}:
    raise ImportError("this checkpoint needs transformers {least} or newer, not " + transformers.__version__)

# transformers takes along what this file imports
'''


def code_files(config: Any) -> dict[str, str]:
    """Return names and sources of the code files that a plugin checkpoint of `config` needs.

    Raises:
        UnsupportedSwapError: the scheme or the family comes from another package, in a form that cannot be bundled.
    """
    if not __name__.startswith("hf_posswap."):  # this is such code itself: it is copied unchanged
        return {path.name: path.read_text(encoding="utf-8") for path in _siblings()}
    family = family_of(config)
    if family.name not in _own_families():
        raise UnsupportedSwapError(
            f"the family {family.name!r} comes from another package: its code cannot be saved with the checkpoint."
        )
    natives = [spec.traits.inside(config) for spec in family.parts if spec.traits is not None]
    return _bundle(sorted(_scheme_names([config.posswap, *natives])))


def _siblings() -> list[Path]:
    return [_HERE.parent / f"{ENTRY}.py", *sorted(_HERE.parent.glob("posswap_*.py"))]


def _scheme_names(value: Any) -> set[str]:
    """Return the names of all schemes in a record, or in a scheme: one may hold others."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    named = {value["name"]} if isinstance(value, dict) and "name" in value else set()
    return named.union(*map(_scheme_names, children))


def _bundle(schemes: list[str]) -> dict[str, str]:
    waiting = [_START, *(f"families.{path.stem}" for path in sorted((_PACKAGE / "families").glob("[a-z]*.py")))]
    files: dict[str, str] = {}
    for name in schemes:
        module = scheme_class(name).__module__
        if module.startswith("hf_posswap."):
            waiting.append(module.removeprefix("hf_posswap."))
        else:
            files[f"posswap_extra_{module.replace('.', '_')}"], needed = _foreign(name, module)
            waiting += needed
    done: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module not in done:
            done.add(module)
            files[_flat(module)], needed = _relative_source(module)
            waiting += needed
    files[ENTRY] = _entry(sorted(set(files) - {_flat(_START)}))
    return {f"{name}.py": source for name, source in files.items()}


def _entry(names: list[str]) -> str:
    version = package_version()
    imports = "\n".join(f"from .{name} import __name__ as _  # noqa: F401" for name in names)
    return (
        _HEADER.format(
            version=version,
            least=".".join(map(str, LEAST_TRANSFORMERS)),
            numbers=LEAST_TRANSFORMERS,
            tested=json.dumps(tested()),
        )
        + f"{imports}\nfrom .{_flat(_START)} import config_reader\nfrom .{_flat('versions')} import state_tested\n\n"
        + f"state_tested(TESTED_VERSIONS)\n{CONFIG_CLASS} = config_reader()\n"
    )


@once
def _relative_source(module: str) -> tuple[str, list[str]]:
    """Return the source of a module of this package, its imports relative, and the modules that they name."""
    return _relative((_PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def _flat(module: str) -> str:
    return f"posswap_{module.replace('.', '_')}"


def _foreign(scheme: str, module: str) -> tuple[str, list[str]]:
    """Return, as `_own` does, another package's module that defines `scheme`, which must stand on its own."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or path is None or not Path(path).is_file():
        raise UnsupportedSwapError(f"the scheme {scheme!r} is defined in no module file that could be saved.")
    source, needed = _relative(Path(path).read_text(encoding="utf-8"))
    for node in ast.walk(ast.parse(source)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not (node.level and str(node.module).startswith("posswap_")):
            names = ["." * node.level + str(node.module)]
        outside = [n for n in names if n.partition(".")[0] not in _HAVE | set(sys.stdlib_module_names)]
        if outside:
            raise UnsupportedSwapError(
                f"the scheme {scheme!r} of {module} imports {outside[0]}, which cannot be saved with the checkpoint."
            )
    return source, needed


def _relative(source: str) -> tuple[str, list[str]]:
    """Return `source` with its imports of hf_posswap made relative and flat, and the modules that they name."""
    lines, needed = source.splitlines(keepends=True), []
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    for node in sorted(nodes, key=lambda n: -n.lineno):
        if isinstance(node, ast.Import):
            if any(alias.name.partition(".")[0] == "hf_posswap" for alias in node.names):
                raise UnsupportedSwapError(f"line {node.lineno}: `import hf_posswap` has no relative form; use from.")
            continue
        if node.level or str(node.module).partition(".")[0] != "hf_posswap":
            continue
        start, stop = node.lineno - 1, int(node.end_lineno or node.lineno)
        tail = lines[stop - 1].encode()[node.end_col_offset :].decode()
        statements: dict[str, list[str]] = {}
        for alias in node.names:
            home, name = _home(str(node.module), alias.name)
            needed.append(home)
            start_of = "from . import" if name is None else f"from .{_flat(home)} import"
            given = _flat(home) if name is None else name
            known = alias.asname or alias.name
            statements.setdefault(start_of, []).append(given if given == known else f"{given} as {known}")
        text = "\n".join(f"{start_of} {', '.join(names)}" for start_of, names in statements.items()) + (tail or "\n")
        lines[start:stop] = [textwrap.indent(text, " " * node.col_offset)]
    return "".join(lines), needed


def _home(module: str, name: str) -> tuple[str, str | None]:
    """Return the module, below hf_posswap, that `from module import name` reads, and the name; None: it is a module."""
    below = module.partition(".")[2]
    folder = _PACKAGE / below.replace(".", "/")
    if not folder.is_dir():
        return below, name
    if (folder / f"{name}.py").is_file():
        return f"{below}.{name}".lstrip("."), None
    stub = folder / "__init__.pyi"  # of a package whose names are loaded when they are asked for
    interface = stub if stub.is_file() else folder / "__init__.py"
    for node in ast.walk(ast.parse(interface.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return _home(str(node.module), name)
    raise UnsupportedSwapError(
        f"{module} does not import {name} from a module of hf_posswap: name that module instead."
    )


@once
def _own_families() -> frozenset[str]:
    """Return the names of the families that this package defines, read from its sources."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (_PACKAGE / "families").glob("*.py")]
    calls = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Family"]
    given = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "name"]
    return frozenset(str(value.value) for value in given if isinstance(value, ast.Constant))


@once
def package_version() -> str:
    """Return the version of hf_posswap, read from its sources: the public package may not be imported from here."""
    for node in ast.parse((_PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise UnsupportedSwapError("hf_posswap/__init__.py states no __version__.")
