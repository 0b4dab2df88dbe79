"""What the engine is given by the layers above it, which it must not import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_posswap.utils.progress import Reporter

Evaluate = Callable[[Any, Sequence[np.ndarray], Sequence[int], int], dict[int, float]]
"""From a model, held-out documents, lengths and the most documents to read, to the loss a token at each length."""

Near = Callable[[Any, Any, Any, Sequence[np.ndarray], Sequence[int]], list[dict[str, Any]]]
"""From an encoder, its base, their tokenizer, documents and lengths, to a row a length: how near its vectors are."""


@dataclass(frozen=True)
class Services:
    """What the engine is given.

    Attributes:
        evaluate: measures a model; None: a recipe that asks for it is refused.
        near: holds an encoder's vectors against those of its base; None: the report does not say it.
        free_bytes: says what is free on a device; None: memory is not checked.
        reporter: shows lines and bars on the main process; None: nothing is shown.
    """

    evaluate: Evaluate | None = None
    near: Near | None = None
    free_bytes: Callable[[torch.device], int | None] | None = None
    reporter: Reporter | None = None
