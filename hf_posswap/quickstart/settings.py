"""All that a quickstart's numbers depend on, in one place, and the names that follow from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from hf_posswap.errors import OptionError


@dataclass(frozen=True)
class BaseSettings:
    """The small GPT-2 that is trained where no model is given.

    Attributes:
        window: positions of its learned table.
        width: of its hidden states.
        layers: of attention and MLP.
        heads: of each attention.
        steps: of training.
        batch: windows a step.
        learning_rate: after the warm-up.
    """

    window: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    steps: int = 1600
    batch: int = 8
    learning_rate: float = 6e-3


@dataclass(frozen=True)
class QuickstartSettings:
    """Everything that the numbers of a quickstart depend on.

    Attributes:
        model: path or Hub id of a causal model; None: the small GPT-2.
        steps: of adaptation, the same for the control and every swapped model.
        seed: of weights, batches, keys, intervals and the continuation.
        device: where it runs.
        learning_rate: of adaptation; None: a third of the base's own; of a given model 1e-3 up to 20 million
            parameters, 1e-4 above.
        step_tokens: tokens of a step of adaptation, in windows; at least one window.
        multiples: of the window, the lengths to measure at; begins with 1.
        documents: most held-out documents to measure on.
        stream_tokens: most tokens to draw training windows from.
        largest_window: a model with a longer window is adapted and measured as if it had this one.
        passkey_depths: where the key stands.
        passkey_trials: keys a cell.
        continuation: tokens to generate, half of them past the window.
        base: of the small GPT-2.
        trust_remote_code: run code that `model` brings, where it needs that to be loaded.
    """

    model: str | None = None
    steps: int = 200
    seed: int = 0
    device: str = "auto"
    learning_rate: float | None = None
    step_tokens: int = 1024
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    documents: int = 48
    stream_tokens: int = 10_000_000
    largest_window: int = 1024
    passkey_depths: tuple[float, ...] = (0.0, 0.5, 1.0)
    passkey_trials: int = 4
    continuation: int = 64
    base: BaseSettings = BaseSettings()
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise OptionError(f"steps is a whole number of at least 1, got {self.steps!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise OptionError(f"seed is a whole number of at least 0, got {self.seed!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def digest(value: Any) -> str:
    """Return 16 hex digits that stand for the JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is a GPU where there is one.

    Raises:
        OptionError: no such device here.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either, by build
        first = str(error).splitlines()[0]
        raise OptionError(f"device {name!r} cannot be used here ({first}): take 'auto' or 'cpu'.") from error
    if device.type == "meta":
        raise OptionError("device 'meta' holds no numbers: take 'auto' or 'cpu'.")
    return device
