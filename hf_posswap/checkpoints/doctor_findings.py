"""The doctor's findings and diagnosis."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from hf_posswap.utils import html_tables
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.result_views import ResultView

Severity = Literal["error", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, repr=False)
class Finding(ResultView):
    """One problem.

    Attributes:
        severity: "error": it does not load, or computes something else than it was trained with; "warning": it may,
            in some program or beyond some length; "note": worth knowing, nothing to fix.
        where: the file and the key in it.
        what: the problem.
        do: the fix.
        code: its kind, one of the codes of `posswap check`.
    """

    severity: Severity
    where: str
    what: str
    do: str
    code: str = "checkpoint"


@dataclass(frozen=True)
class Serving:
    """How one program runs the checkpoint, as `export` says it.

    Attributes:
        target: the program.
        verdict: "exact", "approximate" or "impossible".
        why: the reason, as text.
        command: the command to run; "" if none helps.
        engine: the program's version, and whether it was run or read.
        converted: the stock class to which `posswap to-native` converts first, or "".
        caveat: what besides the positions stands in the way, or "".
    """

    target: str
    verdict: str
    why: str
    command: str
    engine: str
    converted: str = ""
    caveat: str = ""


@dataclass(frozen=True, repr=False)
class Diagnosis(ResultView):
    """The result of `doctor`. `print(diagnosis)` shows it.

    Attributes:
        source: the folder or Hub id.
        positions: its position mechanism, as text.
        findings: the worst first.
        checked: the files and settings that were checked.
        serving: how serving programs run it; () where its positions are unknown.
    """

    source: str
    positions: str
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    serving: tuple[Serving, ...] = ()

    def _repr_facts(self) -> dict[str, object]:
        counts = {name: sum(f.severity == name for f in self.findings) for name in _ORDER}
        facts = {"source": self.source, "clean": self.clean, "positions": self.positions}
        return facts | {f"{name}s": count for name, count in counts.items() if count}

    def _repr_html_(self) -> str:
        blocks = [html_tables.title(f"{self.source}: {self.positions}")]
        rows = [(f.severity, f.where, f.what, f.do) for f in self.findings]
        header = ("severity", "where", "problem", "what to do")
        blocks.append(html_tables.table(rows, header) if rows else html_tables.paragraph("nothing found"))
        serving = [(s.target, s.verdict, s.command or s.why, s.engine) for s in self.serving]
        return html_tables.together([*blocks, *([html_tables.table(serving)] if serving else [])])

    @property
    def clean(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return all(finding.severity == "note" for finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        """Return the diagnosis as JSON."""
        return {
            "source": self.source,
            "clean": self.clean,
            "positions": self.positions,
            "checked": list(self.checked),
            "findings": [asdict(finding) for finding in self.findings],
            "serving": [asdict(each) for each in self.serving],
        }

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.positions}", f"checked: {', '.join(self.checked)}"]
        lines += [f"{f.severity}: {f.where}: {f.what} {f.do}" for f in self.findings]
        if not self.findings:
            lines.append("nothing found")
        for served in self.serving:
            lines.append(f"{served.target}: {served.verdict}: {served.command or served.why} ({served.engine})")
            lines += [f"  {served.caveat}"] if served.caveat else []
        return in_lines(lines)


def worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return `findings` by severity, otherwise in their order."""
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))
