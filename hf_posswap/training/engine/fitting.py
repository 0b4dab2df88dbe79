"""Fits the new mechanism, on the first training windows, to the effect of the model's positions, for a better start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from hf_posswap.errors import DataError, SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.tools.centring import centre_table, check_centring
from hf_posswap.schemes import Scheme
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.config.settings import SwapSettings
from hf_posswap.training.data.windows import TokenWindows
from hf_posswap.training.search import check_fit, fit_bias, fit_rotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MOST_TO_ROTATION = 2048
"""Most tokens of a text in a fit to a rotation: its time grows with the cube of them, and a rotation has no end."""


def fitted_length(geometry: Geometry) -> int:
    """Return the most tokens of a text that a fit to a model of this `geometry` reads.

    Example:
        >>> fitted_length(Geometry(8, 1, 1, 8, 1, original_length=8192, causal=True))
        8192
        >>> fitted_length(Geometry(8, 1, 1, 8, 1, original_length=8192, causal=True, base=10000.0))
        2048
    """
    length = geometry.original_length
    return length if geometry.base is None else min(length, MOST_TO_ROTATION)


def first_windows(windows: TokenWindows, count: int, length: int) -> list[np.ndarray]:
    """Return the first `length` tokens of the first `count` of `windows` without padding there, int64.

    Raises:
        DataError: all windows are padded.
    """
    rows: list[np.ndarray] = []
    for item in range(len(windows)):
        fields = windows[item]
        if "attention_mask" not in fields or bool(fields["attention_mask"][:length].all()):
            rows.append(fields["input_ids"][:length].numpy())
        if len(rows) == count:
            return rows
    if not rows:
        raise DataError(f"swap.fit reads windows without padding, and no text has {length} tokens; use swap.fit=0.")
    return rows


def check_start(model: PreTrainedModel, scheme: Scheme | None, plan: SwapPlan | None, swap: SwapSettings) -> None:
    """Refuse a centring or fit that the unswapped `model` does not support, before anything is changed.

    Args:
        model: not swapped.
        scheme: of the recipe; None: there is no swap.
        plan: of the swap.
        swap: of the recipe.

    Raises:
        UnsupportedSwapError, UnsupportedModelError: the model has no positions that can be fitted to, lacks the
            projections that a fit needs, or has weights of another dtype.
        SchemeError: the scheme cannot be fitted, sets the fitted values itself, or rotates whole heads.
    """
    if swap.centre:
        with _naming_centre_key():
            check_centring(model)
    if swap.fit and scheme is not None and plan is not None:
        with _naming_key("swap.fit", "Or swap.fit=0, which starts without a fit."):
            check_fit(model, plan.scheme if isinstance(scheme, RotaryScheme) else scheme)


def centre(model: PreTrainedModel) -> Tensor:
    """Move the mean of the table of `model` into its token embeddings, and return it [E].

    Raises:
        UnsupportedSwapError: its outputs would change.
    """
    with _naming_centre_key():
        return centre_table(model)


def fit_scheme(model: PreTrainedModel, scheme: Scheme, rows: list[np.ndarray]) -> Scheme:
    """Return `scheme` for the swap of `model`, with the biases of alibi, kerple and t5 fitted."""
    if isinstance(scheme, RotaryScheme):
        return scheme
    return fit_bias(model, scheme, rows, progress=False)  # one bar at a time


def fit_weights(model: PreTrainedModel, rows: list[np.ndarray]) -> str:
    """Fit queries and keys of the swapped `model` if its scheme is rotary, and return the result as a sentence.

    Raises:
        UnsupportedSwapError: the fit misses the expected change of basis.
    """
    if isinstance(applied_swap(model).plan.scheme, RotaryScheme):
        with _naming_key("swap.fit", "Or swap.fit=0, which starts without a fit."):
            return str(fit_rotation(model, rows, progress=False))
    count = sum(map(len, rows))
    return f"the bias of each layer and head fitted to the effect of the model's own positions on {count:,} tokens"


def _naming_centre_key() -> AbstractContextManager[None]:
    """Add the recipe's key and a workaround to errors raised in the block."""
    return _naming_key("swap.centre", "Or swap.centre=false, which leaves the table's mean where it is.")


@contextmanager
def _naming_key(key: str, instead: str) -> Iterator[None]:
    try:
        yield
    except (UnsupportedSwapError, UnsupportedModelError, SchemeError) as error:
        raise type(error)(f"{key}: {error} {instead}") from error
