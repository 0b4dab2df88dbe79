"""transformers' own test classes, imported from a folder of its tests: of its sdist, or of a checkout.

The sdist carries the common tests of models alone. What they import beside them (generation, exports) is taken where
the folder has it, and left out where it has not.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "transformers_suite"
"""What transformers' `tests` are called here, where `tests` are our own."""
BESIDE = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def borrow(folder: Path) -> ModuleType:
    """Return `test_modeling_common` of the folder `tests`."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package
    extra = folder.parent / "extra"
    if extra.is_dir():
        sys.path.append(str(extra))
    for name, mixin in BESIDE.items():
        if not (folder / f"{name.replace('.', '/')}.py").exists():
            _leave_out(name, mixin)
    return importlib.import_module(f"{PACKAGE}.test_modeling_common")


def _leave_out(name: str, mixin: str) -> None:
    """Put an empty class in the place of a mixin whose file is not there."""
    parent, _, _ = name.partition(".")
    for path in (parent, name):
        module = ModuleType(f"{PACKAGE}.{path}")
        module.__path__ = []
        sys.modules.setdefault(module.__name__, module)
    setattr(sys.modules[f"{PACKAGE}.{name}"], mixin, type(mixin, (), {}))
