"""What a dry run found, in numbers and as people read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posswap.training.dryrun.cards import Card
from hf_posswap.training.dryrun.work import Work
from hf_posswap.utils.format import human_bytes

KINDS = ("weights", "gathered weights", "teacher", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Prediction:
    """What one GPU holds and does in a phase of a training.

    Attributes:
        phase: its name; "" where there is only one.
        held: bytes of each kind when most is held; "activations" are all that is of no other kind.
        peak: bytes held then.
        tokens: that one GPU reads in an optimizer step.
        steps: the work of an optimizer step on one GPU, one for each kind of window that the recipe reads by turns.
        processes: GPUs.
        card: what kind; None: it was not said.
    """

    phase: str
    held: dict[str, int]
    peak: int
    tokens: int
    steps: tuple[Work, ...]
    processes: int
    card: Card | None

    @property
    def fits(self) -> bool | None:
        """Whether the card's memory is enough; None: there is no card."""
        return None if self.card is None else self.peak <= self.card.usable

    @property
    def flops(self) -> float:
        """Operations a token, the mean over the kinds of windows."""
        return sum(step.flops for step in self.steps) / len(self.steps) / self.tokens

    @property
    def moved(self) -> float:
        """Bytes a token that operators read and write in the GPU's memory, likewise."""
        return sum(step.moved for step in self.steps) / len(self.steps) / self.tokens

    @property
    def sent(self) -> float:
        """Bytes of an optimizer step to other GPUs, likewise."""
        return sum(step.sent for step in self.steps) / len(self.steps)

    @property
    def seconds(self) -> float | None:
        """The least time of an optimizer step that the card's data sheet allows, likewise; None: it is not known."""
        found = [None if self.card is None else self.card.seconds(step) for step in self.steps]
        known = [one for one in found if one is not None]
        return sum(known) / len(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON."""
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
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values, as a table shows them."""
        found = [(f"memory: {kind}", human_bytes(self.held[kind])) for kind in KINDS if self.held.get(kind)]
        found.append(("at the peak", f"{human_bytes(self.peak)} on each of {self.processes}"))
        if self.card is not None:
            usable = f"{human_bytes(self.card.usable)} of {human_bytes(self.card.memory)} are left for tensors"
            found.append((self.card.name, f"{'it fits' if self.fits else 'it DOES NOT FIT'}: {usable}"))
        said = (
            f"{self.tokens} tokens a GPU, {_count(self.flops)}FLOP and {_count(self.moved)}B of memory traffic a token"
        )
        sent = f", {_count(self.sent)}B sent" if self.sent else ""
        found.append(("optimizer step", f"{said}{sent}"))
        if self.seconds is not None:
            speed = self.processes * self.tokens / self.seconds
            found.append(
                ("its least time", f"{self.seconds:.3g} s: {_count(speed)}tokens a second on {self.processes}")
            )
        return found


def _count(number: float) -> str:
    """Return a number as people write large ones.

    Example:
        >>> _count(48_300_000_000)
        '48.3 G'
    """
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} T"
