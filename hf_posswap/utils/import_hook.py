"""Acting as soon as another package's module is imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def after_import(name: str, ready: str, action: Action) -> None:
    """Call `action` with the module `name`: now where it is imported, otherwise once it has been.

    Args:
        name: dotted name of the module.
        ready: an attribute that the module has when its import is done.
        action: called once.

    Example:
        >>> after_import("json", ready="loads", action=lambda module: print(module.__name__))
        json
    """
    module = sys.modules.get(name)
    if module is not None and hasattr(module, ready):
        action(module)
    else:
        sys.meta_path.insert(0, _After(name, action))


class _After(MetaPathFinder):
    """Lets the other finders find one module, and acts when it has been executed."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action, self.done = name, action, False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name or self.done:
            return None
        self.done = True  # it stays in sys.meta_path: a thread that walks through that would miss the next finder
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
