"""What is loaded late: public names of a package, and what waits for the import of another package.

The names are stated once, in the `__init__.pyi`, and each is loaded from its home when it is asked for. The stub is
what type checkers and editors read; reading it here as well leaves no second list that could differ
(https://scientific-python.org/specs/spec-0001/). Loading late keeps `import hf_posswap` free of torch, and has a name
load the module that defines it and no other. `after_import` acts as soon as another package's module is imported,
without importing it.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

Action = Callable[[ModuleType], None]


def attach_public_names(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` calls this.

    Args:
        package: its `__name__`.
        file: its `__file__`; the stub is next to it.

    Example:
        >>> import hf_posswap.comparison.report
        >>> _, _, names = attach_public_names("hf_posswap.comparison.report", hf_posswap.comparison.report.__file__)
        >>> names[:3]
        ['PAGE', 'check_results', 'render_html']
    """
    homes = read_homes(package, Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))

    def load_name(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        value = home if homes[name] == f"{package}.{name}" else getattr(home, name)
        setattr(sys.modules[package], name, value)  # found at once from now on
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load_name, list_names, list(homes)


def read_homes(package: str, stub: str) -> dict[str, str]:
    """Return the names that `stub` gives to `package` and the modules that define them, constants and classes first.

    Example:
        >>> read_homes("shop", "from shop.till import Till as Till, PRICE as PRICE\\nfrom shop import errors as errors")
        {'PRICE': 'shop.till', 'Till': 'shop.till', 'errors': 'shop.errors'}
    """
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    homes = {
        alias.name: f"{package}.{alias.name}" if node.module == package else str(node.module)
        for node in imports
        for alias in node.names
    }
    return dict(sorted(homes.items(), key=lambda item: (not item[0].isupper(), not item[0][0].isupper(), item[0])))


def after_import(name: str, ready: str, action: Action) -> None:
    """Call `action` with the module `name`: now where it is imported, otherwise once it has been.

    Args:
        name: dotted name of the module.
        ready: an attribute that the module has when its import is done.
        action: called once, also where the module was only looked for before, or its first import was interrupted.

    Example:
        >>> after_import("json", ready="loads", action=lambda module: print(module.__name__))
        json
    """
    module = sys.modules.get(name)
    if module is not None and hasattr(module, ready):
        action(module)
    else:
        sys.meta_path.insert(0, _After(name, action))


def call_late(home: str, name: str, *arguments: object) -> None:
    """Call the function `name` of the module `home`, which is imported only now."""
    getattr(importlib.import_module(home), name)(*arguments)


class _After(MetaPathFinder):
    """Lets the other finders find one module, and acts when it has been executed."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action, self.done = name, action, False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name or self.done:  # it stays in sys.meta_path: a thread that walks through that would miss one
            return None
        finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in finders if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self.name and not self.done:  # a loader may serve several modules, or one repeatedly
                self.action(module)
                self.done = True  # not before: a module may be found and not imported, or its import be interrupted

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
