"""The self-check: all its checks, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hf_posswap.selfcheck.report import Check, Report, versions
from hf_posswap.selfcheck.touch import touch_of, words_of
from hf_posswap.selfcheck.trial import KINDS, RESTS_ON, FamilyKind, Trial
from hf_posswap.selfcheck.upstream import UPSTREAM


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
