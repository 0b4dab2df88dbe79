"""What a quickstart shows of its trainings."""

from __future__ import annotations

from hf_posswap.utils.progress import Reporter


class TrainingReporter(Reporter):
    """Says of which model a line is, and leaves the report at the end of a training to the file that it lies in.

    Args:
        reporter: of the quickstart.
        name: of the model.
    """

    def __init__(self, reporter: Reporter, name: str) -> None:
        super().__init__(reporter.console)
        self.name, self._reports = name, False

    def line(self, text: str) -> None:
        self._reports = self._reports or text.startswith("# ")
        if not self._reports:
            super().line(f"{self.name}: {text}")
