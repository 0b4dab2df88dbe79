"""Public names of a package, stated once, in its `__init__.pyi`, and each loaded from its home when it is asked for.

The stub is what type checkers and editors read; reading it here as well leaves no second list that could differ
(https://scientific-python.org/specs/spec-0001/). Loading late keeps `import hf_posswap` free of torch, and has a name
load the module that defines it and no other.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach_public_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` calls this.

    Args:
        package: its `__name__`.
        file: its `__file__`; the stub is next to it.

    Example:
        >>> import hf_posswap.report
        >>> _, _, names = attach_public_names("hf_posswap.report", hf_posswap.report.__file__)
        >>> names[:3]
        ['PAGE', 'check_results', 'render_html']
    """
    homes = read_homes(package, Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))

    def load_name(name: str) -> Any:
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
