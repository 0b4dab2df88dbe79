"""The log of a run, a line of JSON per measurement, consistent after a resume; the progress bar; and the loss curve.

The curve shows every measurement, the running mean, and held-out losses.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posswap.errors import CheckpointError
from hf_posswap.plotting import canvas
from hf_posswap.utils.atomic_io import write_text
from hf_posswap.utils.format import human_bytes
from hf_posswap.utils.progress import Reporter, Task
from hf_posswap.utils.untrusted import parse_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]


_KEPT = ("loss", "grad_norm", "learning_rate")
_SMOOTHED = 30  # fewer points are not smoothed
_PARTS = 15  # the running mean covers one of this many parts of a curve
_FIRST_COLOUR = 2  # blue: grey and black are for unswapped models


@dataclass(eq=False)
class RunLog:
    """Lines of JSON in one file.

    Attributes:
        path: of the file.
        writes: whether this process writes.
    """

    path: Path
    writes: bool = field(default=True, kw_only=True)

    def write(self, entry: dict[str, object]) -> None:
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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._before = max((entry.get("seconds", 0.0) for entry in self.log.entries()), default=0.0)
        self._began, self._first = time.monotonic(), state.global_step
        if self.reporter is not None:
            self._task = self._stack.enter_context(self.reporter.task(self.label, state.max_steps))
            self._task.skip(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if args.logging_strategy == "steps" and state.global_step >= state.max_steps:
            control.should_log = True
        if self._task is not None:
            self._task.advance(self.tokens, self._loss, more=self._more)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        self._tick()
        if not logs or "loss" not in logs:
            return
        self._loss = float(logs["loss"])
        peak = peak_memory()
        self._more = f"lr {logs['learning_rate']:.2g}" + ("" if peak is None else f"  {human_bytes(peak)}")
        session_seconds = self.seconds - self._before
        session_steps = state.global_step - self._first
        self.log.write(
            {
                "step": state.global_step,
                **{name: logs[name] for name in _KEPT if name in logs},
                "tokens": state.global_step * self.tokens,
                "tokens_per_second": round(session_steps * self.tokens / max(session_seconds, 1e-9), 1),
                "seconds": round(self.seconds, 3),
                **({} if peak is None else {"peak_memory": peak}),
            }
        )

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        losses = [(name.partition("loss_at_")[2], nll) for name, nll in (metrics or {}).items()]
        loss_by_length = {length: nll for length, nll in losses if length}
        self.log.write({"step": state.global_step, "nll": loss_by_length})

    def _tick(self) -> None:
        self.seconds = self._before + time.monotonic() - self._began

    def close(self) -> None:
        """Stop the clock and close the progress bar, whether the training succeeded or not."""
        self._tick()
        self._stack.close()
        self._task = None


def peak_memory() -> int | None:
    """Return the peak memory of this process in bytes, of its GPU if it has one; None: not known, as on Windows."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    if resource is None:
        return None
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


def draw_losses(
    curves: Sequence[tuple[str, list[dict[str, object]]]],
    path: Path,
    *,
    below: str,
    unit: str = "nats a token",
) -> None:
    """Plot the training loss over the tokens read, a line per phase, and write it to `path` (PNG and SVG).

    Held-out losses in the log are plotted as dots, a colour per length.

    Args:
        curves: name and log entries of each phase, in order.
        path: of the picture, a .png.
        below: a line under the title.
        unit: of the loss.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> entries = [{"step": 1, "tokens": 128, "loss": 5.0}, {"step": 2, "tokens": 256, "loss": 4.0}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_losses([("training", entries)], Path(folder) / "loss.png", below="gpt2, rope")
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['loss.png', 'loss.svg']
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    picture, (ax,) = canvas.figure(8.0, 4.6)
    canvas.title(ax, "Training loss", below)
    measured = _draw_phases(ax, curves)
    if measured:
        colour = _FIRST_COLOUR + len(curves)
        for number, (length, points) in enumerate(measured.items()):
            marker = canvas.MARKERS[number % len(canvas.MARKERS)]
            label = f"held out, {int(length):,} tokens"
            style = {"color": _colour(colour + number), "marker": marker, "markersize": 5, "linewidth": 1.0}
            ax.plot(*zip(*points, strict=True), label=label, zorder=3, **style)  # type: ignore[arg-type]
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(7))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: count(tokens)))
    ax.margins(x=0.02)
    ax.set_xlabel("tokens read", fontsize=9, color=canvas.INK)
    ax.set_ylabel(f"{unit}, lower is better", fontsize=9, color=canvas.INK)
    if len(curves) > 1 or measured:
        ax.legend(fontsize=9, frameon=False, labelcolor=canvas.INK)
    canvas.save(picture, path)


def _draw_phases(ax: Axes, curves: Sequence[tuple[str, list[dict[str, Any]]]]) -> dict[str, list[tuple[float, float]]]:
    """Plot the phases one after another, and return tokens and loss of held-out measurements by length."""
    offset, measured = 0.0, dict[str, list[tuple[float, float]]]()
    for number, (name, entries) in enumerate(curves):
        steps = [entry for entry in entries if "loss" in entry]
        if not steps:
            continue
        tokens = np.array([offset + entry["tokens"] for entry in steps])
        losses = np.array([entry["loss"] for entry in steps])
        smooth, mean = len(losses) >= _SMOOTHED, running_mean(losses, len(losses) // _PARTS)
        style: dict[str, Any] = {"color": _colour(_FIRST_COLOUR + number), "solid_capstyle": "round"}
        if smooth:
            ax.plot(tokens, losses, linewidth=0.8, alpha=0.3, **style)
        marker = "" if smooth else "o"
        ax.plot(tokens, mean if smooth else losses, marker=marker, markersize=3.5, linewidth=2.0, label=name, **style)
        tokens_per_step = steps[-1]["tokens"] / steps[-1]["step"]
        for entry in (entry for entry in entries if "nll" in entry):
            for length, nll in entry["nll"].items():
                measured.setdefault(length, []).append((offset + entry["step"] * tokens_per_step, nll))
        if number:
            ax.axvline(offset, color=canvas.FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        offset = float(tokens[-1])
    return measured


def _colour(number: int) -> str:
    return canvas.COLOURS[number % len(canvas.COLOURS)]


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the last `window` values at each index, [N]; of fewer at the beginning.

    Example:
        >>> running_mean(np.array([4.0, 2.0, 2.0, 8.0]), 2)
        array([4., 3., 2., 5.])
    """
    sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - max(1, window))
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def count(number: float) -> str:
    """Return a number of tokens with a unit prefix.

    Example:
        >>> [count(n) for n in (0, 512, 1500, 250000, 1.5e6, 2e9)]
        ['0', '512', '1.5 k', '250 k', '1.5 M', '2 G']
    """
    for size, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{name}"
    return f"{number:.4g}"
