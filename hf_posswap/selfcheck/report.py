"""What a self-check found: one line for each thing that was tried."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

PACKAGES = ("hf-posswap", "transformers", "torch", "safetensors", "accelerate", "peft")


@dataclass(frozen=True)
class Check:
    """One thing that was tried.

    Attributes:
        subject: "transformers", or a kind of family with its swap.
        step: what was asked of it.
        ok: whether it held; None: not tried, because an earlier step failed.
        said: what was found.
        touch: where it failed, what it goes by in transformers, and where hf_posswap does so; None where it held.
    """

    subject: str
    step: str
    ok: bool | None
    said: str
    touch: str | None = None


@dataclass(frozen=True)
class Report:
    """What `selfcheck` found.

    Attributes:
        versions: of Python and of the packages that a swap rests on.
        checks: in order.
        seconds: that it took.
    """

    versions: dict[str, str]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not hold, without those that were not tried."""
        return tuple(check for check in self.checks if check.ok is False)

    @property
    def ok(self) -> bool:
        """Whether all held."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        checks = [dict(vars(check)) for check in self.checks]
        return {"ok": self.ok, "versions": self.versions, "seconds": round(self.seconds, 1), "checks": checks}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a swap rests on; "not installed" where there is none.

    Example:
        >>> list(versions())[:3]
        ['python', 'hf-posswap', 'transformers']
    """
    return {"python": platform.python_version()} | {name: _installed(name) for name in PACKAGES}


def _installed(package: str) -> str:
    if package == "hf-posswap":  # the code that runs, installed or not
        from hf_posswap import __version__

        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
