"""The code that goes with a plugin checkpoint, so that `trust_remote_code=True` loads it where hf_posswap is missing.

It is one file, `modeling_posswap.py`: a loader of a few lines, and the sources of the package's own modules: those that
`checkpoints/auto.py` imports, directly or not, and those of the scheme and of the families. Their imports of hf_posswap
name the module that defines a name; not another character changes.
"""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import family_of
from hf_posswap.schemes.base import scheme_class
from hf_posswap.utils.threads import once
from hf_posswap.versions import tested

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ENTRY = "modeling_posswap"
"""Name of the module that config.json names under `auto_map`."""
CONFIG_CLASS = "PosswapConfig"
AUTO_MAP = {"AutoConfig": f"{ENTRY}.{CONFIG_CLASS}"}
"""Only the config: transformers asks it for the model classes, so no model is ever built without its swap."""

_START = "checkpoints.auto"
_HAVE = {"torch", "transformers", "numpy", "safetensors"}  # wherever transformers loads a model
_PACKAGE = Path(__file__).resolve().parents[2]
LEAST_TRANSFORMERS = (5, 14)
_HEADER = '''"""Loads this checkpoint where hf_posswap is not installed: from_pretrained(..., trust_remote_code=True).

Made by hf_posswap {version} (Apache License 2.0) from its own modules. SOURCES below has them, each after those it
imports: the files of that release but for the lines that import hf_posswap. Better: pip install hf-posswap, then
`import hf_posswap` before from_pretrained; that needs neither this code nor the flag. Either way: Python 3.11 and
transformers {least}, or newer. It was tested with the versions below; on others it proves itself on a tiny model first,
or refuses (POSSWAP_UNTESTED=allow leaves that out).
"""

import importlib.abc
import importlib.util
import re
import sys

import transformers

HF_POSSWAP_VERSION = "{version}"
TESTED_VERSIONS = {tested}
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < {numbers}:
    raise ImportError("this checkpoint needs transformers {least} or newer, not " + transformers.__version__)


class SourceImporter(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the modules in SOURCES as submodules of this one."""

    prefix = __name__ + "."

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a submodule of this module; None: it is another's."""
        if not (name.startswith(self.prefix) and (self.below(name) in SOURCES or self.is_package(name))):
            return None
        below = [] if self.is_package(name) else None
        file = self.get_filename(name)
        return importlib.util.spec_from_file_location(name, file, loader=self, submodule_search_locations=below)

    def below(self, name):
        """Return the name of a submodule as it is in SOURCES."""
        return name.removeprefix(self.prefix)

    def is_package(self, name):
        """Return whether SOURCES has modules below `name`."""
        return any(known.startswith(self.below(name) + ".") for known in SOURCES)

    def get_filename(self, name):
        """Return what tracebacks call the file of a submodule."""
        return __file__ + "/hf_posswap/" + self.below(name).replace(".", "/") + ".py"

    def get_source(self, name):
        """Return the source of a submodule with relative imports: this module may have any name."""
        above = "." * (self.below(name).count(".") + 1)
        source = SOURCES.get(self.below(name), "")
        return re.sub(r"^(\\s*from) hf_posswap(?:\\.|(?= import))", rf"\\1 {{above}}", source, flags=re.MULTILINE)

    def get_code(self, name):
        """Return the compiled source of a submodule."""
        return self.source_to_code(self.get_source(name), self.get_filename(name))


SOURCES = {{
'''
_FOOTER = """}}

__path__ = []  # modules below this one are those of SOURCES
for _name in [name for name in list(sys.modules) if name.startswith(SourceImporter.prefix)]:  # threads import others
    del sys.modules[_name]  # of an earlier version of this file
for _earlier in [one for one in sys.meta_path if getattr(one, "prefix", None) == SourceImporter.prefix]:
    sys.meta_path.remove(_earlier)
sys.meta_path.append(SourceImporter())
importlib.import_module(SourceImporter.prefix + "versions").state_tested(TESTED_VERSIONS)
for _name in SOURCES:
    if _name.startswith("families.interfaces."):  # each imports a model's code, which another release may have moved
        continue
    if _name.startswith(("schemes.", "families.", "extra_")):  # these register what they define
        importlib.import_module(SourceImporter.prefix + _name)
{config_class} = importlib.import_module(SourceImporter.prefix + "{start}").config_reader()
"""


def code_files(config: PreTrainedConfig) -> dict[str, str]:
    """Return name and source of the code file that a plugin checkpoint of `config` needs.

    Raises:
        UnsupportedSwapError: the scheme or the family comes from another package, in a form that cannot be bundled.
    """
    if not __name__.startswith("hf_posswap."):  # this is such code itself: it is copied unchanged
        entry = __name__.removesuffix(".patching.record.remote_code")
        return {f"{ENTRY}.py": Path(str(sys.modules[entry].__file__)).read_text(encoding="utf-8")}
    family = family_of(config)
    if family.name not in _own_families():
        raise UnsupportedSwapError(
            f"the family {family.name!r} comes from another package: its code cannot be saved with the checkpoint."
        )
    natives = [spec.traits.inside(config) for spec in family.parts if spec.traits is not None]
    return {f"{ENTRY}.py": _bundle(sorted(_scheme_names([config.posswap, *natives])))}


def _scheme_names(value: object) -> set[str]:
    """Return the names of all schemes in a record, or in a scheme: one may hold others."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    named = {value["name"]} if isinstance(value, dict) and "name" in value else set()
    return named.union(*map(_scheme_names, children))


def _bundle(schemes: list[str]) -> str:
    """Return the one file of code, each module in it after those that it imports."""
    sources: dict[str, str] = {}
    entered: set[str] = set()

    def add(module: str) -> None:
        if module not in entered:
            entered.add(module)
            source, needed = _direct_source(module)
            for other in needed:
                add(other)
            sources[module] = source

    add(_START)
    for path in sorted((_PACKAGE / "families").rglob("[a-z]*.py")):  # with the interfaces, imported by their names
        add(".".join(path.relative_to(_PACKAGE).with_suffix("").parts))
    for name in schemes:
        module = scheme_class(name).__module__
        if module.startswith("hf_posswap."):
            add(module.removeprefix("hf_posswap."))
            continue
        source, needed = _foreign(name, module)
        for other in needed:
            add(other)
        sources[f"extra_{module.replace('.', '_')}"] = source
    header = _HEADER.format(
        version=package_version(),
        least=".".join(map(str, LEAST_TRANSFORMERS)),
        numbers=LEAST_TRANSFORMERS,
        tested=json.dumps(tested()),
    )
    quoted = "".join(f'    "{module}": {_quoted(source)},\n' for module, source in sources.items())
    return header + quoted + _FOOTER.format(config_class=CONFIG_CLASS, start=_START)


def _quoted(source: str) -> str:
    """Return `source` as a literal in which it can be read."""
    quotes = "'" * 3
    readable = f"r{quotes}" + source.replace(quotes, f'{quotes} "{quotes}" r{quotes}') + quotes
    try:
        return readable if ast.literal_eval(readable) == source else repr(source)
    except SyntaxError:
        return repr(source)


@once
def _direct_source(module: str) -> tuple[str, list[str]]:
    """Return the source of a module of this package, its imports direct, and the modules that they name."""
    return _direct((_PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def _foreign(scheme: str, module: str) -> tuple[str, list[str]]:
    """Return, as `_direct` does, another package's module that defines `scheme`, which must stand on its own."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or path is None or not Path(path).is_file():
        raise UnsupportedSwapError(f"the scheme {scheme!r} is defined in no module file that could be saved.")
    source, needed = _direct(Path(path).read_text(encoding="utf-8"))
    for node in ast.walk(ast.parse(source)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).partition(".")[0] != "hf_posswap"):
            names = ["." * node.level + str(node.module)]
        outside = [n for n in names if n.partition(".")[0] not in _HAVE | set(sys.stdlib_module_names)]
        if outside:
            raise UnsupportedSwapError(
                f"the scheme {scheme!r} of {module} imports {outside[0]}, which cannot be saved with the checkpoint."
            )
    return source, needed


def _direct(source: str) -> tuple[str, list[str]]:
    """Return `source`, whose imports of hf_posswap name the module that defines a name, and these modules."""
    lines, needed = source.splitlines(keepends=True), []
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    for node in sorted(nodes, key=lambda n: -n.lineno):
        if isinstance(node, ast.Import):
            if any(alias.name.partition(".")[0] == "hf_posswap" for alias in node.names):
                raise UnsupportedSwapError(
                    f"line {node.lineno}: `import hf_posswap` cannot be saved with a checkpoint; use from."
                )
            continue
        if node.level or str(node.module).partition(".")[0] != "hf_posswap":
            continue
        start, stop = node.lineno - 1, int(node.end_lineno or node.lineno)
        tail = lines[stop - 1].encode()[node.end_col_offset :].decode()
        statements: dict[str, list[str]] = {}
        for alias in node.names:
            home, name = _home(str(node.module), alias.name)
            needed.append(home)
            above, _, last = f"hf_posswap.{home}".rpartition(".")
            start_of = f"from {above} import" if name is None else f"from hf_posswap.{home} import"
            given, known = name or last, alias.asname or alias.name
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
