"""The results of a dry run, as numbers and as a table, for GPUs by their data sheets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_posswap.errors import OptionError, UnknownNameError
from hf_posswap.training.dryrun.meter import Work
from hf_posswap.utils.format import human_bytes
from hf_posswap.utils.result_views import ResultView

GIB = 1 << 30
_RESERVED = GIB
"""Bytes of the CUDA context and of the workspaces of cuBLAS and NCCL, which hold no tensors."""
_FRAGMENTED = 0.04
"""Share of the memory that the caching allocator loses to fragmentation."""
_HALF = (torch.bfloat16, torch.float16)
_SIZE = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(GB|GiB|MB|MiB|G|M)?", re.IGNORECASE)
_UNITS = {"m": 1 << 20, "g": GIB}
_HOUR = 3600
KINDS = ("weights", "gathered weights", "teacher", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Card:
    """A GPU, or a memory size of which nothing else is known.

    Attributes:
        name: for messages.
        memory: bytes.
        half: dense tensor-core operations a second in bfloat16 and float16; 0: not known.
        single: operations a second in float32 without TF32, torch's default.
        bandwidth: bytes a second between memory and chip.
        link: bytes a second that it sends to the other GPUs of its machine.
        source: of these numbers.
    """

    name: str
    memory: int
    half: float = 0.0
    single: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    source: str = ""

    @property
    def usable(self) -> int:
        """Bytes that tensors may take."""
        return int(self.memory * (1 - _FRAGMENTED)) - _RESERVED

    def seconds(self, work: Work) -> float | None:
        """Return the least time of `work`: its operators one by one, with communication overlapping them.

        None: the card's speed is not known.
        """
        if not self.half:
            return None
        operator_seconds = (
            count * max(flops / (self.half if dtype in _HALF else self.single), moved / self.bandwidth)
            for (dtype, flops, moved), count in work.items.items()
        )
        return max(sum(operator_seconds), work.sent / self.link)


CARDS = {
    "h100": Card(
        "H100 SXM, 80 GB", 80 * GIB, 989.4e12, 66.9e12, 3.35e12, 450e9,
        "NVIDIA H100 Tensor Core GPU data sheet (SXM5): https://resources.nvidia.com/en-us-tensor-core",
    ),
    "a100": Card(
        "A100 SXM, 80 GB", 80 * GIB, 312e12, 19.5e12, 2.039e12, 300e9,
        "NVIDIA A100 Tensor Core GPU data sheet (SXM4, 80 GB): https://www.nvidia.com/en-us/data-center/a100/",
    ),
    "4090": Card(
        "GeForce RTX 4090, 24 GB", 24 * GIB, 165.2e12, 82.6e12, 1.008e12, 32e9,
        "NVIDIA Ada GPU Architecture white paper, appendix A (float32 accumulation), and PCIe 4.0 x16",
    ),
}  # fmt: skip
"""Known cards by name. The link is one direction's bandwidth."""


def card_of(name: str) -> Card:
    """Return the card called `name`, or one with that much memory ("24GB").

    Raises:
        UnknownNameError: `name` is neither a card nor a memory size.
        OptionError: the memory is not larger than what CUDA itself takes.

    Example:
        >>> card_of("h100").memory == card_of("80GB").memory
        True
    """
    known = CARDS.get(name.strip().lower())
    if known is not None:
        return known
    size = _SIZE.fullmatch(name.strip())
    if size is None or not size[2]:
        raise UnknownNameError("GPU", name, [*CARDS, "a size such as 24GB"])
    card = Card(f"a GPU of {name.strip()}", int(float(size[1]) * _UNITS[size[2][0].lower()]))
    if card.usable <= 0:
        raise OptionError(f"--gpu {name}: CUDA itself takes about 1 GB; give the memory of a GPU, such as 24GB.")
    return card


@dataclass(frozen=True, repr=False)
class Prediction(ResultView):
    """The memory and work of one GPU in a phase of a training.

    Attributes:
        phase: its name; "" if there is only one.
        held: bytes of each kind at the peak; "activations" are all that have no other kind.
        peak: bytes at the peak.
        tokens: tokens that one GPU reads in an optimizer step.
        steps: the work of an optimizer step on one GPU, for each window length that the recipe alternates.
        processes: number of GPUs.
        card: the GPU; None: not given.
        max_steps: optimizer steps of the phase.
    """

    phase: str
    held: dict[str, int]
    peak: int
    tokens: int
    steps: tuple[Work, ...]
    processes: int
    card: Card | None
    max_steps: int = 1

    def _repr_facts(self) -> dict[str, object]:
        gpu, tokens = None if self.card is None else self.card.name, self.tokens
        return {"phase": self.phase, "gpu": gpu, "fits": self.fits, "peak": human_bytes(self.peak), "tokens": tokens}

    def _html_rows(self) -> list[tuple[str, str]]:
        return self.rows()

    @property
    def fits(self) -> bool | None:
        """Whether the card's memory is enough; None: no card was given."""
        return None if self.card is None else self.peak <= self.card.usable

    @property
    def flops(self) -> float:
        """FLOPs per token, the mean over window lengths."""
        return sum(step.flops for step in self.steps) / len(self.steps) / self.tokens

    @property
    def moved(self) -> float:
        """Bytes per token of the GPU's memory traffic, likewise."""
        return sum(step.moved for step in self.steps) / len(self.steps) / self.tokens

    @property
    def sent(self) -> float:
        """Bytes sent to other GPUs per optimizer step, likewise."""
        return sum(step.sent for step in self.steps) / len(self.steps)

    @property
    def seconds(self) -> float | None:
        """The least seconds per optimizer step by the card's data sheet, likewise; None: not known."""
        step_seconds = [None if self.card is None else self.card.seconds(step) for step in self.steps]
        known = [seconds for seconds in step_seconds if seconds is not None]
        return sum(known) / len(known) if known else None

    @property
    def hours(self) -> float | None:
        """The least hours of all optimizer steps; None: not known."""
        return None if self.seconds is None else self.seconds * self.max_steps / _HOUR

    @property
    def all_tokens(self) -> int:
        """Tokens that all optimizer steps read on all GPUs."""
        return self.max_steps * self.tokens * self.processes

    def to_dict(self) -> dict[str, object]:
        """Return the prediction as JSON."""
        return {
            "phase": self.phase,
            "processes": self.processes,
            "gpu": None if self.card is None else self.card.name,
            "usable_bytes": None if self.card is None else self.card.usable,
            "fits": self.fits,
            "peak_bytes": self.peak,
            "held_bytes": {kind: self.held[kind] for kind in KINDS if self.held.get(kind)},
            "tokens_a_step": self.tokens,
            "flops_a_token": self.flops,
            "moved_bytes_a_token": self.moved,
            "sent_bytes_a_step": self.sent,
            "least_seconds_a_step": self.seconds,
            "steps": self.max_steps,
            "tokens": self.all_tokens,
            "least_hours": self.hours,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values, as a table shows them."""
        table_rows = [(f"memory: {kind}", human_bytes(self.held[kind])) for kind in KINDS if self.held.get(kind)]
        table_rows.append(("at the peak", f"{human_bytes(self.peak)} on each of {self.processes}"))
        if self.card is not None:
            usable = f"{human_bytes(self.card.usable)} of {human_bytes(self.card.memory)} are left for tensors"
            table_rows.append((self.card.name, f"{'it fits' if self.fits else 'it DOES NOT FIT'}: {usable}"))
        step_text = (
            f"{self.tokens} tokens a GPU, {_count(self.flops)}FLOP and {_count(self.moved)}B of memory traffic a token"
        )
        sent_text = f", {_count(self.sent)}B sent" if self.sent else ""
        table_rows.append(("optimizer step", f"{step_text}{sent_text}"))
        if self.seconds is not None:
            speed = self.processes * self.tokens / self.seconds
            table_rows.append(
                ("its least time", f"{self.seconds:.3g} s: {_count(speed)}tokens a second on {self.processes}")
            )
        return table_rows


def total_row(predictions: Sequence[Prediction]) -> tuple[str, str]:
    """Return the steps, tokens, least hours and GPU hours of all phases, as a row of a table.

    Example:
        >>> total_row([Prediction("", {}, 1, 1000, (), 8, None, max_steps=400)])
        ('in all', '400 steps, 3.2 M tokens')
    """
    steps, tokens = (sum(getattr(each, name) for each in predictions) for name in ("max_steps", "all_tokens"))
    text = f"{steps:,} steps, {_count(tokens).rstrip()} tokens"
    hours = [each.hours for each in predictions]
    known = [each for each in hours if each is not None]
    if len(known) < len(hours):
        return "in all", text
    gpu_hours = sum(each * prediction.processes for each, prediction in zip(known, predictions, strict=True))
    return "in all", f"{text}: at least {_hours(sum(known))}, {gpu_hours:,.3g} GPU hours"


def _hours(hours: float) -> str:
    """Return a time with its unit.

    Example:
        >>> _hours(30.0), _hours(0.25)
        ('30 hours', '15 minutes')
    """
    seconds = hours * _HOUR
    if seconds < 60:
        return f"{seconds:.3g} seconds"
    return f"{hours:,.3g} hours" if hours >= 1 else f"{60 * hours:.3g} minutes"


def _count(number: float) -> str:
    """Return a number with a unit prefix.

    Example:
        >>> _count(48_300_000_000)
        '48.3 G'
    """
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} T"
