"""The report of a self-check, with one entry per check."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

from hf_posswap.utils.result_views import ResultView

PACKAGES = ("hf-posswap", "transformers", "torch", "safetensors", "accelerate", "peft")


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        subject: "transformers", or a kind of family with its swap.
        step: the step that is checked.
        ok: whether it passed; None: skipped, because an earlier step failed.
        said: the outcome as text.
        touch: if it failed, the transformers code that it depends on, and the place in hf_posswap; otherwise None.
    """

    subject: str
    step: str
    ok: bool | None
    said: str
    touch: str | None = None


@dataclass(frozen=True, repr=False)
class Report(ResultView):
    """The report of `selfcheck`.

    Attributes:
        versions: versions of Python and of the packages that a swap depends on.
        checks: all checks, in order.
        seconds: duration in seconds.
    """

    versions: dict[str, str]
    checks: tuple[Check, ...]
    seconds: float

    def _repr_facts(self) -> dict[str, Any]:
        seconds = round(self.seconds, 1)
        return {"ok": self.ok, "checks": len(self.checks), "failed": len(self.failed), "seconds": seconds}

    def _html_rows(self) -> list[tuple[str, str]]:
        outcome = {True: "ok", False: "FAILED", None: "skipped"}
        rows = [(f"{check.subject}: {check.step}", f"{outcome[check.ok]}: {check.said}") for check in self.checks]
        return [*self.versions.items(), *rows]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The failed checks, without skipped ones."""
        return tuple(check for check in self.checks if check.ok is False)

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        checks = [dict(vars(check)) for check in self.checks]
        return {"ok": self.ok, "versions": self.versions, "seconds": round(self.seconds, 1), "checks": checks}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a swap depends on, or "not installed".

    Example:
        >>> list(versions())[:3]
        ['python', 'hf-posswap', 'transformers']
    """
    return {"python": platform.python_version()} | {name: _installed(name) for name in PACKAGES}


def _installed(package: str) -> str:
    if package == "hf-posswap":  # the running code, installed or not
        from hf_posswap import __version__

        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
