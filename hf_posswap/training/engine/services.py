"""Functions that the layers above pass to the engine, which must not import them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_posswap.schemes import Scheme
from hf_posswap.utils.progress import Reporter

Evaluate = Callable[..., dict[int, float]]
"""From a model, held-out documents, lengths and the most documents to read, to the loss per token at each length.

If the loss counts only some tokens, `counted` says for each document, bool [its tokens], which ones.
"""
CheckFit = Callable[[Any, Scheme], None]
"""Raises if the scheme cannot be fitted to the unswapped model."""
FitBias = Callable[[Any, Scheme, Sequence[np.ndarray]], Scheme]
"""From an unswapped model, a scheme and rows of token ids, to the scheme fitted to the model's table."""
FitRotation = Callable[[Any, Sequence[np.ndarray]], object]
"""From a swapped model, whose weights it changes, and rows of token ids, to a printable summary of the fit."""
Near = Callable[[Any, Any, Any, Sequence[np.ndarray], Sequence[int]], list[dict[str, Any]]]
"""From an encoder, its base, their tokenizer, documents and lengths, to the similarity of vectors, a row per length."""


@dataclass(frozen=True)
class Services:
    """Functions for the engine.

    Attributes:
        evaluate: measures a model; None: a recipe that needs it is refused.
        near: compares an encoder's vectors with its base's; None: the report leaves this out.
        free_bytes: returns the free memory of a device; None: memory is not checked.
        check_fit, fit_bias, fit_rotation: check and fit a new mechanism to a table; None: a recipe that needs them is
            refused.
        reporter: shows lines and bars on the main process; None: nothing is shown.
    """

    evaluate: Evaluate | None = None
    near: Near | None = None
    free_bytes: Callable[[torch.device], int | None] | None = None
    check_fit: CheckFit | None = None
    fit_bias: FitBias | None = None
    fit_rotation: FitRotation | None = None
    reporter: Reporter | None = None
