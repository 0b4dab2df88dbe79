"""The start check: compares the swapped model with the unswapped one on a batch."""

from __future__ import annotations

import math
from typing import Any, Protocol

from hf_posswap.errors import TrainingError
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.training.config import SENTENCES, Recipe
from hf_posswap.training.engine.gates import FirstLoss, check_first_loss, probe
from hf_posswap.training.engine.sentences import Pooling, all_vectors, distance


class Start(Protocol):
    """Measurements of the unswapped model."""

    def check(self, model: Any, plan: SwapPlan | None, above: float | None) -> str:
        """Return a sentence on the swapped `model` if it starts as `plan` predicts; raise a TrainingError otherwise.

        Args:
            model: swapped.
            plan: of the swap; None: there is none.
            above: the recipe's gates.start_above.
        """


def measure_start(
    recipe: Recipe, model: Any, batch: dict[str, Any], *, causal: bool, window: int, pooling: Pooling | None
) -> Start:
    """Measure the unswapped `model` on `batch`, up to its window.

    Args:
        recipe: without stages.
        model: not yet swapped, on its device.
        batch: arguments of its forward, with labels.
        causal: whether it predicts the next token.
        window: tokens that it can read.
        pooling: of its states, for objectives on text vectors.
    """
    if recipe.objective.kind in SENTENCES:
        assert pooling is not None
        return _Vectors(model, batch, pooling, window)
    return _Loss(model, batch, causal, window)


class _Loss:
    def __init__(self, model: Any, batch: dict[str, Any], causal: bool, window: int) -> None:
        self.batch, self.causal, self.window = batch, causal, window
        before = probe(model, batch, causal=causal, plain=window)
        self.before = FirstLoss(before, model.config.get_text_config().vocab_size)

    def check(self, model: Any, plan: SwapPlan | None, above: float | None) -> str:
        loss = probe(model, self.batch, causal=self.causal)
        plain = probe(model, self.batch, causal=self.causal, plain=self.window)
        return check_first_loss(loss, plain, self.before, plan, above)


class _Vectors:
    """Measures how far the swap moves the vectors of texts."""

    def __init__(self, model: Any, batch: dict[str, Any], pooling: Pooling, window: int) -> None:
        self.batch, self.pooling, self.window = batch, pooling, window
        self.before = all_vectors(model, pooling, batch, plain=window)

    def check(self, model: Any, plan: SwapPlan | None, above: float | None) -> str:
        moved = distance(all_vectors(model, self.pooling, self.batch, plain=self.window), self.before)
        message = f"the swap moved the vectors of texts by {moved:.3f} (1 - cosine)"
        if math.isfinite(moved) and (above is None or moved <= above):
            return message
        raise TrainingError(
            f"{message}, and gates.start_above allows {'any finite number' if above is None else above}. "
            f"Likely cause: the fields of {None if plan is None else plan.scheme} do not fit this model. "
            "gates.start=false skips the check."
        )
