"""The log of a run, a line of JSON per measurement, consistent after a resume; and the progress bar."""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import write_text
from hf_posswap.utils.format import human_bytes
from hf_posswap.utils.progress import Reporter, Task
from hf_posswap.utils.untrusted import parse_json

_KEPT = ("loss", "grad_norm", "learning_rate")


class RunLog:
    """Lines of JSON in one file.

    Args:
        path: of the file.
        writes: whether this process writes.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line."""
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries, without lines that a kill or a crash cut off."""
        if not self.path.exists():
            return []
        entries = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = parse_json(line)
            except ValueError:
                continue
            entries += [entry] if isinstance(entry, dict) and "step" in entry else []
        return entries

    def go_back_to(self, step: int) -> None:
        """Drop entries after `step`: a run that resumes there writes them again."""
        if self.writes and self.path.exists():
            kept = [entry for entry in self.entries() if entry["step"] <= step]
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))


class Watch(TrainerCallback):
    """Writes the log and advances the progress bar.

    Args:
        log: of the run.
        reporter: of this process; None: nothing is shown.
        label: of the bar.
        tokens: that one step reads, over all processes.
    """

    def __init__(self, log: RunLog, reporter: Reporter | None, label: str, tokens: int) -> None:
        self.log, self.reporter, self.label, self.tokens = log, reporter, label, tokens
        self._stack = ExitStack()
        self._task: Task | None = None
        self._loss: float | None = None
        self._more = ""
        self._began, self._first, self._before = 0.0, 0, 0.0
        self.seconds = 0.0
        """Seconds of training, over all sessions in the log."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before = max((entry.get("seconds", 0.0) for entry in self.log.entries()), default=0.0)
        self._began, self._first = time.monotonic(), state.global_step
        if self.reporter is not None:
            self._task = self._stack.enter_context(self.reporter.task(self.label, state.max_steps))
            self._task.skip(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._task is not None:
            self._task.advance(self.tokens, self._loss, more=self._more)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        self._tick()
        if not logs or "loss" not in logs:
            return
        self._loss = float(logs["loss"])
        self._more = f"lr {logs['learning_rate']:.2g}  {human_bytes(peak_memory())}"
        session_seconds = self.seconds - self._before
        session_steps = state.global_step - self._first
        self.log.write(
            {
                "step": state.global_step,
                **{name: logs[name] for name in _KEPT if name in logs},
                "tokens": state.global_step * self.tokens,
                "tokens_per_second": round(session_steps * self.tokens / max(session_seconds, 1e-9), 1),
                "seconds": round(self.seconds, 3),
                "peak_memory": peak_memory(),
            }
        )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        losses = [(name.partition("loss_at_")[2], nll) for name, nll in (metrics or {}).items()]
        loss_by_length = {length: nll for length, nll in losses if length}
        self.log.write({"step": state.global_step, "nll": loss_by_length})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tick()

    def _tick(self) -> None:
        self.seconds = self._before + time.monotonic() - self._began

    def close(self) -> None:
        """Close the progress bar, whether the training succeeded or not."""
        self._stack.close()
        self._task = None


def peak_memory() -> int:
    """Return the peak memory of this process in bytes, of its GPU if it has one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else 1024 * max_rss


def tensorboard_callback(folder: Path, after: int = 0) -> TrainerCallback:
    """Return a callback that writes TensorBoard events to `folder`.

    Args:
        folder: of the event files.
        after: step from which a training resumes: events of later steps are purged.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    try:
        writer = SummaryWriter(str(folder), purge_step=after + 1)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}. Choose another out.") from error
    return TensorBoardCallback(writer)
