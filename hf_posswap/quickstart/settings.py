"""Everything that a quickstart's numbers depend on, in one place."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from hf_posswap.errors import OptionError


@dataclass(frozen=True)
class QuickstartSettings:
    """Everything that the numbers of a quickstart depend on.

    Attributes:
        model: path or Hub id of a causal model; None: the small GPT-2 of the package.
        schemes: schemes to swap to; None: all that the model supports, or rope and alibi for the package's model.
        steps: training steps, the same for the control and every swapped model.
        seed: random seed of the text order, of needles and intervals, and of the continuation.
        device: the device.
        step_tokens: tokens per training step; at least one window of the longest length.
        multiples: the measured lengths as multiples of the window, starting with 1.
        documents: maximum number of held-out documents for evaluation.
        training_documents: maximum number of training documents, including a few held-out ones; None: all.
        metrics: metrics to measure; None: those of `posswap compare`.
        largest_window: a model with a longer window is trained and measured as if it had this one.
        continuation: number of tokens to generate, half of them past the window.
        trust_remote_code: run code that comes with `model` if loading needs it.
    """

    model: str | None = None
    schemes: tuple[str, ...] | None = None
    steps: int = 200
    seed: int = 0
    device: str = "auto"
    step_tokens: int = 2048
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    documents: int = 48
    training_documents: int | None = None
    metrics: tuple[str, ...] | None = None
    largest_window: int = 1024
    continuation: int = 64
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise OptionError(f"steps is a whole number of at least 1, got {self.steps!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise OptionError(f"seed is a whole number of at least 0, got {self.seed!r}.")

    def lengths(self, window: int) -> tuple[int, ...]:
        """Return the lengths to measure at, in tokens, of a model with `window` positions.

        Example:
            >>> QuickstartSettings().lengths(128)
            (128, 256, 512, 1024)
        """
        return tuple(window * multiple for multiple in sorted(self.multiples))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        return json.loads(json.dumps(dataclasses.asdict(self)))
