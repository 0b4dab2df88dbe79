"""The pytest plugin: `pytest --posswap-contract MODULE` runs the contract for what the module registers.

It is loaded with every pytest in an environment, and costs nothing until the option is given: nothing else is imported.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hf_posswap.testing.contract.cases import Case, Registered

OPTION = "--posswap-contract"
_REGISTERED = pytest.StashKey[list["Registered"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("hf_posswap").addoption(
        OPTION,
        action="append",
        default=[],
        metavar="MODULE",
        help="Run the contract of hf_posswap for the schemes and families that a module, or a .py file, registers. "
        "Repeatable.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Import the modules.

    Raises:
        UsageError: one cannot be imported, or registers nothing.
    """
    modules = config.getoption(OPTION)
    if not modules:
        return
    from hf_posswap.errors import OptionError
    from hf_posswap.testing.contract.cases import registered_by

    try:
        config.stash[_REGISTERED] = [registered_by(module) for module in modules]
    except OptionError as error:
        raise pytest.UsageError(f"{OPTION}: {error}") from error


@pytest.hookimpl(tryfirst=True)  # before -k and -m select
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cases of the contract to what was collected."""
    for registered in config.stash.get(_REGISTERED, []):
        collector = ContractCollector.from_parent(
            session, name=registered.module, nodeid=Path(registered.module).name, registered=registered
        )
        report = collector.ihook.pytest_make_collect_report(collector=collector)
        items += report.result
        collector.ihook.pytest_collectreport(report=report)


class ContractCollector(pytest.Collector):
    """The cases of one module.

    Args:
        registered: what it registers.
        options: those of pytest's nodes.
    """

    def __init__(self, *, registered: Registered, **options: Any) -> None:
        super().__init__(**options)
        self.registered = registered

    def collect(self) -> Iterator[pytest.Item]:
        from hf_posswap.testing.contract.cases import cases_of

        for case in cases_of(self.registered):
            yield ContractItem.from_parent(self, name=case.name, case=case)


class ContractItem(pytest.Item):
    """One case as a test.

    Args:
        case: the case.
        options: those of pytest's nodes.
    """

    def __init__(self, *, case: Case, **options: Any) -> None:
        super().__init__(**options)
        self.case = case
        for ignored in case.ignored:
            self.add_marker(pytest.mark.filterwarnings(ignored))

    def runtest(self) -> None:
        from hf_posswap.testing.contract.checks import SkippedPointError

        with tempfile.TemporaryDirectory() as folder:
            try:
                self.case.run(Path(folder))
            except SkippedPointError as error:
                pytest.skip(str(error))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from hf_posswap.testing.contract.checks import BrokenPromiseError

        error = excinfo.value
        if not isinstance(error, Exception):
            return super().repr_failure(excinfo, style)
        if isinstance(error, BrokenPromiseError):
            expected, seen, where = error.expected, error.seen, ""
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            expected, seen = "what the promise says", f"{type(error).__name__}: {error}"
            where = f"\n  raised at {last.filename}:{last.lineno}, in {last.name}"
        return (
            f"{self.case.subject}, in {self.case.where}, breaks a promise\n"
            f"  promise:  {self.case.promise}\n  expected: {expected}\n  seen:     {seen}{where}"
        )

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path(self.parent.name if self.parent else "."), None, self.name
