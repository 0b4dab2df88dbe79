"""Progress output of a quickstart's trainings."""

from __future__ import annotations

from hf_posswap.utils.progress import Reporter


class TrainingReporter(Reporter):
    """Prefixes each line with the model's name, and omits the report at the end of a training, which is in a file.

    Args:
        reporter: the quickstart's reporter.
        name: the model's name.
    """

    def __init__(self, reporter: Reporter, name: str) -> None:
        super().__init__(reporter.console)
        self.name, self._reports = name, False

    def line(self, text: str) -> None:
        self._reports = self._reports or text.startswith("# ")
        if not self._reports:
            super().line(f"{self.name}: {text}")
