"""The result of `check`, and what each code of a finding means."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from hf_posswap.checkpoints.doctor_findings import Finding
from hf_posswap.errors import PositionCheckError
from hf_posswap.utils import html_tables
from hf_posswap.utils.format import said_by
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.result_views import ResultView

CODES: dict[str, str] = {
    "angles-differ": "the angles in the model are not those of its config, which was changed after the model was built",
    "angles-formula": "the angles of the class are not those of the formula that its rope parameters name",
    "angles-missing": "the angles are on the meta device, and the weights are not",
    "angles-nonfinite": "the angles are not finite numbers: memory that nothing filled",
    "angles-rounded": "the angles were cast to a half precision",
    "attention-factor": "the factor on cos and sin (YaRN, LongRoPE) is missing, or programs differ in it",
    "checkpoint": "another problem of the checkpoint's files, as `posswap doctor` finds it",
    "generation-length": "generation_config generates more tokens than the model has positions for",
    "length-raised": "max_position_embeddings was raised, and nothing extends the positions",
    "length-table": "the position table has fewer rows than the config has positions",
    "load": "the model cannot be built or loaded",
    "mask-ignored": "what stands at masked tokens changes the other tokens' outputs",
    "outputs-constant": "the outputs are the same at every position, whatever the tokens: the weights hold nothing",
    "outputs-nonfinite": "the outputs are NaN or infinite: broken weights, or an overflow of the dtype",
    "packing": "documents in one row, with position ids that start again, are not computed as alone",
    "padding": "a padded row is not computed as the row alone",
    "rope-key": "a key of the rope settings that this model does not read",
    "rope-settings": "the rope settings are not an object",
    "rope-type": "a rope type that transformers does not have",
    "rope-type-twice": "`type` and `rope_type` differ",
    "scaling-by-length": "the angles depend on the length of the text",
    "scaling-factor": "a scaling without a usable factor, or with lists of another length than the angles",
    "scaling-ignored": "the class does not read the scaling that its config names",
    "scaling-lengths": "factor, original length and max_position_embeddings contradict each other",
    "scaling-lost": "the scaling in config.json is not in the loaded config",
    "scaling-noop": "a scaling that changes no angle",
    "scaling-original": "a scaling without the original length",
    "scaling-twice": "`rope_scaling` and `rope_parameters` differ",
    "serving": "a program that serves the checkpoint computes other positions",
    "swap": "the swap of hf_posswap is not in force",
    "theta-ignored": "a theta is set where nothing reads it",
    "theta-lost": "the theta in config.json is not in the loaded config",
    "theta-missing": "no theta anywhere: each program takes its own default",
    "theta-null": "theta is null",
    "theta-outside": "theta stands outside of rope_parameters",
    "theta-twice": "two thetas that differ",
    "theta-value": "theta is not a number above 1",
    "tokenizer-length": "the tokenizer cuts texts at another length than the model's",
}
"""What each code means; `posswap check --json` and `Finding.code` have them."""


@dataclass
class Coverage:
    """What was checked, what was not and why, and which of that failed to run."""

    checked: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def skip(self, check: str, why: str) -> None:
        """Add a check that does not apply, or was not requested."""
        self.skipped.append(f"{check}: {why}")

    def fail(self, check: str, error: Exception | str) -> None:
        """Add a check that should have run and could not."""
        why = error if isinstance(error, str) else f"{type(error).__name__}: {said_by(error, 200)}"
        self.skip(check, why)
        self.failed.append(self.skipped[-1])


@dataclass(frozen=True, repr=False)
class CheckReport(ResultView):
    """The result of `check`. `print(report)` shows it.

    Attributes:
        source: what was checked: a folder, a Hub id, or the class of a model.
        findings: the worst first; each has a code, a severity, a place, the cause and the fix.
        checked: what was checked.
        skipped: what was not checked, and why.
        failed: those lines of `skipped` whose checks should have run and could not: a forward that raised, weights that
            are missing. The others do not apply, or were not requested.
    """

    source: str
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error in what was checked."""
        return not self._of("error")

    @property
    def clean(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return not self._of("error", "warning")

    @property
    def complete(self) -> bool:
        """Whether no check failed to run."""
        return not self.failed

    def _of(self, *severities: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity in severities]

    def raise_if_errors(self, *, strict: bool = False) -> None:
        """Raise if there are errors, or with `strict` warnings or checks that failed to run.

        Raises:
            PositionCheckError: the message has each of them, with its fix.
        """
        severities = ("error", "warning") if strict else ("error",)
        problems = self._of(*severities)
        failed = [f"not checked: {line}" for line in self.failed] if strict else []
        if problems or failed:
            does = "does not do what its config says about positions" if problems else "could not be checked completely"
            raise PositionCheckError("\n".join([f"{self.source} {does}:", *map(_line, problems), *failed]))

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON."""
        return {
            "source": self.source,
            "ok": self.ok,
            "clean": self.clean,
            "complete": self.complete,
            "findings": [asdict(finding) for finding in self.findings],
            "checked": list(self.checked),
            "skipped": list(self.skipped),
            "failed": list(self.failed),
        }

    def _repr_facts(self) -> dict[str, object]:
        return {"source": self.source, "ok": self.ok, "codes": [finding.code for finding in self.findings]}

    def _repr_html_(self) -> str:
        rows = [(f.severity, f.code, f.where, f.what, f.do) for f in self.findings]
        header = ("severity", "code", "where", "problem", "what to do")
        list_html = html_tables.table(rows, header) if rows else html_tables.paragraph("nothing found")
        rest = [("checked", line) for line in self.checked] + [("Not checked", line) for line in self.skipped]
        return html_tables.together([html_tables.title(self.source), list_html, html_tables.table(rest)])

    def __str__(self) -> str:
        verdict = ("ok" if self.complete else "no errors in what was checked") if self.ok else "not ok"
        lines = [f"{self.source}: {verdict}", f"checked: {', '.join(self.checked)}"]
        lines += [_line(finding) for finding in self.findings] or ["nothing found"]
        return in_lines(lines + [f"Not checked: {line}" for line in self.skipped])


def _line(finding: Finding) -> str:
    return f"{finding.severity} {finding.code}: {finding.where}: {finding.what} {finding.do}"
