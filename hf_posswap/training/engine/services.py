"""What the engine is given by the layers above it, which it must not import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_posswap.schemes import Scheme
from hf_posswap.utils.progress import Reporter

Evaluate = Callable[[Any, Sequence[np.ndarray], Sequence[int], int], dict[int, float]]
"""From a model, held-out documents, lengths and the most documents to read, to the loss a token at each length."""
CheckFit = Callable[[Any, Scheme], None]
"""Refuses, of an unswapped model and a scheme, what the two below could not fit."""
FitBias = Callable[[Any, Scheme, Sequence[np.ndarray]], Scheme]
"""From an unswapped model, a scheme and rows of token ids, to the scheme fitted to the model's table."""
FitRotation = Callable[[Any, Sequence[np.ndarray]], object]
"""From a swapped model, whose weights it changes, and rows of token ids, to what says in words how near it came."""
Near = Callable[[Any, Any, Any, Sequence[np.ndarray], Sequence[int]], list[dict[str, Any]]]
"""From an encoder, its base, their tokenizer, documents and lengths, to a row a length: how near its vectors are."""


@dataclass(frozen=True)
class Services:
    """What the engine is given.

    Attributes:
        evaluate: measures a model; None: a recipe that asks for it is refused.
        near: holds an encoder's vectors against those of its base; None: the report does not say it.
        free_bytes: says what is free on a device; None: memory is not checked.
        check_fit, fit_bias, fit_rotation: fit a new mechanism to a table, after a look whether that can be; None: a
            recipe that asks for it is refused.
        reporter: shows lines and bars on the main process; None: nothing is shown.
    """

    evaluate: Evaluate | None = None
    near: Near | None = None
    free_bytes: Callable[[torch.device], int | None] | None = None
    check_fit: CheckFit | None = None
    fit_bias: FitBias | None = None
    fit_rotation: FitRotation | None = None
    reporter: Reporter | None = None
