"""The self-check: all its checks, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hf_posswap.selfcheck.report import Check, Report, versions
from hf_posswap.selfcheck.touch import touch_of, words_of
from hf_posswap.selfcheck.trial import KINDS, RESTS_ON, Kind, Trial
from hf_posswap.selfcheck.upstream import UPSTREAM


def selfcheck() -> Report:
    """Return whether this installation does what hf_posswap promises: in less than a minute, without the network.

    What a swap rests on in transformers is asked for answers that are known. Then, for one tiny model of each kind of
    family: its swap is planned, carried out and verified; steps with a cache equal a full forward; what is saved and
    loaded computes the same; and `unpatch_model` gives back the very logits of before. Nothing is raised: what fails
    stands in the report, with what it goes by in transformers.

    Example:
        >>> report = selfcheck()
        >>> report.ok, report.checks[0].subject
        (True, 'transformers')
    """
    started = time.monotonic()
    checks = [*_of_upstream(), *(check for kind in KINDS for check in _of_kind(kind))]
    return Report(versions(), tuple(checks), time.monotonic() - started)


def _of_upstream() -> Iterator[Check]:
    for name, check in UPSTREAM.items():
        try:
            wrong = check()
        except Exception as error:  # what is gone raises whatever it likes
            wrong = words_of(error)
        yield Check("transformers", name, wrong is None, wrong or "as known", None if wrong is None else name)


def _of_kind(kind: Kind) -> Iterator[Check]:
    broken = False
    for name, step in Trial(kind).steps().items():
        if broken:
            yield Check(str(kind), name, None, "not tried")
            continue
        try:
            yield Check(str(kind), name, True, step())
        except Exception as error:  # a release that moved something raises whatever it likes
            broken = True
            yield Check(str(kind), name, False, words_of(error), touch_of(error, RESTS_ON[name]))
