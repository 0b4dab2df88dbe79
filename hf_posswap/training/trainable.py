"""Which parameters training may change, and at which rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_posswap.errors import OptionError

What = Literal["full", "lora", "dora", "rslora", "positions", "norms_qk", "new_rows"]
WHATS: tuple[What, ...] = get_args(What)
ADAPTERS: tuple[What, ...] = ("lora", "dora", "rslora")


@dataclass(frozen=True)
class TrainableSettings:
    """Which parameters training may change, and at which rates.

    Attributes:
        what: "full": all. "lora", "dora", "rslora": PEFT adapters, and what the swap added in full. "positions": what
            the swap added alone. "norms_qk": norms, query and key projections, and what the swap added. "new_rows":
            the rows that the swap added to a position table; the rows that were there stay bit for bit.
        target: layers that get adapters: "attention" projections, or "all" linear layers of the blocks.
        rank: of the adapters.
        alpha: of the adapters; None: twice the rank.
        dropout: of the adapters.
        embeddings: train the token embeddings too, beside adapters, positions or norms
            (https://arxiv.org/abs/2309.12307).
        norms: train the norms too, likewise.
        positions_rate: learning rate of what the swap added, as a multiple of the run's.
        layer_decay: each layer's learning rate as a multiple of the next one's; 1: all the same.
    """

    what: What = "full"
    target: Literal["attention", "all"] = "attention"
    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    embeddings: bool = False
    norms: bool = False
    positions_rate: float = 1.0
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if self.what not in WHATS:
            problems.append(f"what is one of {', '.join(WHATS)}, got {self.what!r}")
        if self.target not in ("attention", "all"):
            problems.append(f"target is 'attention' or 'all', got {self.target!r}")
        if self.rank < 1:
            problems.append(f"rank is a whole number of at least 1, got {self.rank!r}")
        if self.alpha is not None and not self.alpha > 0:
            problems.append(f"alpha is a number above 0, got {self.alpha!r}")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout lies between 0 and 1, got {self.dropout!r}")
        if not self.positions_rate > 0:
            problems.append(f"positions_rate is a number above 0, got {self.positions_rate!r}")
        if not 0 < self.layer_decay <= 1:
            problems.append(f"layer_decay lies above 0 and is at most 1, got {self.layer_decay!r}")
        if self.what in ("full", "new_rows") and (self.embeddings or self.norms):
            problems.append(f"embeddings and norms say what to train beside adapters, and what is {self.what!r}")
        if problems:
            raise OptionError(f"trainable: {'; '.join(problems)}.")


def prepare_trainable(model: Any, settings: TrainableSettings) -> Any:
    """Return `model` with exactly the parameters of `settings` left to train; adapters come as a PEFT model around it.

    Args:
        model: a transformers model, swapped or not.
        settings: which parameters.
    """
    raise NotImplementedError


def parameter_groups(
    model: Any, settings: TrainableSettings, *, learning_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Return the groups for an optimizer: no decay on vectors, rates by layer and for what the swap added.

    Args:
        model: as `prepare_trainable` returned it, possibly wrapped since.
        settings: the same.
        learning_rate: of the run.
        weight_decay: of matrices.
    """
    raise NotImplementedError
