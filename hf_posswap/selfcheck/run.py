"""The self-check: all its checks, in order, and their report."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_posswap.selfcheck.trial import KINDS, RESTS_ON, FamilyKind, Trial, touch_of, words_of
from hf_posswap.selfcheck.upstream import UPSTREAM
from hf_posswap.utils.result_views import ResultView

PACKAGES = ("hf-posswap", "transformers", "torch", "safetensors", "accelerate", "peft")


def selfcheck() -> Report:
    """Check that this installation of hf_posswap works, in less than a minute and without the network.

    First, the parts of transformers that a swap depends on are checked against known results. Then, for one tiny model
    of each kind of family: the swap is planned, applied and verified; steps with a cache equal a full forward; saving
    and loading preserves the logits; and `unpatch_model` restores the exact logits. Nothing is raised: failures are in
    the report, with the transformers code that they depend on.

    Example:
        >>> report = selfcheck()
        >>> report.ok, report.checks[0].subject
        (True, 'transformers')
    """
    started = time.monotonic()
    checks = [*_of_upstream(), *(check for family in KINDS for check in _check_family(family))]
    return Report(versions(), tuple(checks), time.monotonic() - started)


def _of_upstream() -> Iterator[Check]:
    for name, check in UPSTREAM.items():
        try:
            wrong = check()
        except Exception as error:  # a missing API may raise anything
            wrong = words_of(error)
        yield Check("transformers", name, wrong is None, wrong or "as known", None if wrong is None else name)


def _check_family(family: FamilyKind) -> Iterator[Check]:
    broken = False
    for name, step in Trial(family).steps().items():
        if broken:
            yield Check(str(family), name, None, "not tried")
            continue
        try:
            yield Check(str(family), name, True, step())
        except Exception as error:  # a changed release may raise anything
            broken = True
            yield Check(str(family), name, False, words_of(error), touch_of(error, RESTS_ON[name]))


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
