"""The output of `posswap --version`."""

from __future__ import annotations

import importlib.metadata
import platform

from hf_posswap import __version__
from hf_posswap.versions import is_tested, tested, tested_range


def version_lines() -> list[str]:
    """Return the version of hf_posswap with the tested range of each package, and what is installed here.

    Example:
        >>> version_lines()[0].startswith("hf_posswap ")
        True
    """
    ranges = ", ".join(f"{package} {tested_range(package)}" for package in tested())
    here = [f"Python {platform.python_version()}", *(_installed(package) for package in tested())]
    return [f"hf_posswap {__version__} (tested with {ranges})", f"installed: {', '.join(here)}"]


def _installed(package: str) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"
    return f"{package} {version}" + ("" if is_tested(package, version) else " (not tested)")
