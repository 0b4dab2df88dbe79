"""The fitness of a candidate: the loss of the model with its scheme."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from hf_posswap.evaluation import measure_losses
from hf_posswap.patching.apply.patch_model import patch_model, unpatch_model
from hf_posswap.schemes import Scheme
from hf_posswap.search.interrupts import Interrupts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def scheme_loss(model: PreTrainedModel, scheme: Scheme, documents: np.ndarray, interrupts: Interrupts) -> float:
    """Return the mean loss of `model` with `scheme` over all scored tokens of `documents` [N, L], in nats per token.

    The model is patched by `patch_model`, measured, and always restored.

    Raises:
        NumericError: a loss is not finite.
        KeyboardInterrupt: Ctrl-C was pressed; it is checked after each document.
    """
    length = documents.shape[1]
    patch_model(model, scheme)
    try:
        losses = measure_losses(model, documents, [length], one_pass=False, on_document=lambda *_: interrupts.check())
    finally:
        unpatch_model(model)
    return float(losses[length].mean(dtype=np.float64))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode inside the block, then restore the mode of each module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
