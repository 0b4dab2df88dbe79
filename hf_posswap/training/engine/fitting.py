"""A start that is nearer: the new mechanism fitted, on the first windows of the training, to what the table did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hf_posswap.errors import ConfigError, DataError, SchemeError, UnsupportedSwapError
from hf_posswap.schemes import Scheme
from hf_posswap.schemes.common.bias import LinearBias
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.data.windows import TokenWindows
from hf_posswap.training.engine.services import Services


def first_windows(windows: TokenWindows, count: int, length: int) -> list[np.ndarray]:
    """Return the first `length` tokens of each of the first `count` of `windows` that have no padding there, int64.

    Raises:
        DataError: all of them are padded.
    """
    found: list[np.ndarray] = []
    for item in range(len(windows)):
        fields = windows[item]
        if "attention_mask" not in fields or bool(fields["attention_mask"][:length].all()):
            found.append(fields["input_ids"][:length].numpy())
        if len(found) == count:
            return found
    if not found:
        raise DataError(f"swap.fit reads windows without padding, and no text has {length} tokens; use swap.fit=0.")
    return found


def fit_scheme(model: Any, scheme: Scheme, rows: list[np.ndarray], services: Services) -> Scheme:
    """Return `scheme` as it is to be put into the unswapped `model`: the biases of alibi and t5 fitted.

    Raises:
        ConfigError: no such fit is known, or it was not given.
        UnsupportedSwapError: the model has no table that it could be fitted to.
        SchemeError: the scheme says itself what the fit finds.
    """
    if not isinstance(scheme, LinearBias | RotaryScheme):
        raise ConfigError(
            f"swap.fit: nothing of {scheme.name} is fitted to a table; what is: alibi, t5, and rope and its kind with "
            "partial below 1. Leave swap.fit out."
        )
    if services.fit_bias is None or services.fit_rotation is None:
        raise ConfigError("swap.fit: the engine was called without what fits; use hf_posswap.run_recipe.")
    if isinstance(scheme, RotaryScheme):
        return scheme
    with _explained():
        fitted: Scheme = services.fit_bias(model, scheme, rows)
    return fitted


def fit_weights(model: Any, rows: list[np.ndarray], services: Services) -> str:
    """Fit queries and keys of the swapped `model` where its scheme rotates, and return what was found, in a sentence.

    Raises:
        UnsupportedSwapError: they cannot be.
        SchemeError: the scheme turns whole heads.
    """
    if isinstance(model._posswap.plan.scheme, RotaryScheme):
        assert services.fit_rotation is not None
        with _explained():
            return str(services.fit_rotation(model, rows))
    return f"the bias of each layer and head fitted to what the table did on {sum(map(len, rows)):,} tokens"


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (UnsupportedSwapError, SchemeError) as error:
        raise type(error)(f"swap.fit: {error} Or swap.fit=0, which starts without a fit.") from error
