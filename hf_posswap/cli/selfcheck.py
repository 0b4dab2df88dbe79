"""`posswap selfcheck`: whether this installation works."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import typer

from hf_posswap.cli.arguments import Json
from hf_posswap.cli.outcome import Code
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_table, show_text

if TYPE_CHECKING:
    from hf_posswap.selfcheck import Report


def selfcheck(json: Json = False) -> None:
    """Prove in less than a minute that this installation works, or name the step that fails.

    Swaps one tiny model of each kind of family: plan, patch, verify, steps with a cache, save and load, unpatch.
    Nothing is downloaded, and nothing stays on the disk. The exit code is 1 if a check failed.

    Example: posswap selfcheck
    """
    with quiet_library():
        from hf_posswap.selfcheck import selfcheck as check_all

        report = check_all()
    if json:
        show_json(report.to_dict())
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(Code.OTHER)


def _show(report: Report) -> None:
    show_pairs(report.versions.items())
    show_text("")
    rows = []
    for subject, group in groupby(report.checks, key=lambda check: check.subject):
        checks = list(group)
        wrong = next((check for check in checks if check.ok is False), None)
        outcome = f"{len(checks)} checks hold" if wrong is None else f"{wrong.step}: {wrong.said}"
        rows.append(("ok" if wrong is None else "FAILED", subject, outcome))
    show_table(["", "what", "found"], rows)
    for check in report.failed:
        show_text("", f"{check.subject}, {check.step}: look at {check.touch}")
    summary = "all hold" if report.ok else f"{len(report.failed)} failed"
    show_text("", f"{len(report.checks)} checks in {report.seconds:.0f} s: {summary}.")
