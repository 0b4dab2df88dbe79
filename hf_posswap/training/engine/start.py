"""How a training starts: what one batch says of the unswapped model, and what it must say of the swapped one."""

from __future__ import annotations

import math
from typing import Any, Protocol

from hf_posswap.errors import TrainingError
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.training.config import SENTENCES, Recipe
from hf_posswap.training.engine.gates import FirstLoss, check_first_loss, probe
from hf_posswap.training.engine.sentences import Pooling, all_vectors, distance


class Start(Protocol):
    """What was measured of the unswapped model."""

    def check(self, model: Any, plan: SwapPlan | None, above: float | None) -> str:
        """Return a sentence on the swapped `model`, which starts as `plan` predicts; raise a TrainingError otherwise.

        Args:
            model: swapped.
            plan: of the swap; None: there is none.
            above: of the recipe's gates.start_above.
        """


def measure_start(
    recipe: Recipe, model: Any, batch: dict[str, Any], *, causal: bool, window: int, pooling: Pooling | None
) -> Start:
    """Return what `batch` says of the unswapped `model`, on as much of it as its window holds.

    Args:
        recipe: without stages.
        model: not yet swapped, on its device.
        batch: arguments of its forward, with labels.
        causal: whether it predicts the next token.
        window: tokens that it can read.
        pooling: of its states, where vectors of texts are trained.
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
    """Vectors of texts have no loss of their own: what counts is how far the swap moved them."""

    def __init__(self, model: Any, batch: dict[str, Any], pooling: Pooling, window: int) -> None:
        self.batch, self.pooling, self.window = batch, pooling, window
        self.before = all_vectors(model, pooling, batch, plain=window)

    def check(self, model: Any, plan: SwapPlan | None, above: float | None) -> str:
        found = distance(all_vectors(model, self.pooling, self.batch, plain=self.window), self.before)
        said = f"the swap moved the vectors of texts by {found:.3f} (1 - cosine)"
        if math.isfinite(found) and (above is None or found <= above):
            return said
        raise TrainingError(
            f"{said}, and gates.start_above allows {'a number' if above is None else above}. Likely cause: the fields "
            f"of {None if plan is None else plan.scheme} do not fit this model. gates.start=false starts all the same."
        )
