"""A start that is nearer: the new mechanism fitted, on the first windows of the training, to what the table did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from hf_posswap.errors import ConfigError, DataError, SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.tools.centring import centre_table, check_centring
from hf_posswap.schemes import Scheme
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.config.settings import SwapSettings
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


def check_start(
    model: Any, scheme: Scheme | None, plan: SwapPlan | None, swap: SwapSettings, services: Services
) -> None:
    """Refuse what `swap` asks of the start and the unswapped `model` cannot have, before anything is touched.

    Args:
        model: not swapped.
        scheme: of the recipe; None: there is no swap.
        plan: of the swap.
        swap: of the recipe.
        services: that fit.

    Raises:
        ConfigError: what fits was not given.
        UnsupportedSwapError, UnsupportedModelError: the model has no table that checkpoints hold, or no such parts as
            a fit needs, or weights of another dtype.
        SchemeError: nothing of the scheme is fitted, or it says itself what the fit finds, or turns whole heads.
    """
    if swap.centre:
        with _explained_centring():
            check_centring(model)
    if swap.fit and scheme is not None and plan is not None:
        if services.check_fit is None or services.fit_bias is None or services.fit_rotation is None:
            raise ConfigError("swap.fit: the engine was called without what fits; use hf_posswap.run_recipe.")
        with _explained("swap.fit", "Or swap.fit=0, which starts without a fit."):
            services.check_fit(model, plan.scheme if isinstance(scheme, RotaryScheme) else scheme)


def centre(model: Any) -> Tensor:
    """Move the mean of the table of `model` into its token embeddings, and return it [E].

    Raises:
        UnsupportedSwapError: its outputs would not stay.
    """
    with _explained_centring():
        return centre_table(model)


def fit_scheme(model: Any, scheme: Scheme, rows: list[np.ndarray], services: Services) -> Scheme:
    """Return `scheme` as it is to be put into the unswapped `model`: the biases of alibi and t5 fitted."""
    if isinstance(scheme, RotaryScheme):
        return scheme
    assert services.fit_bias is not None  # check_start saw to that
    return services.fit_bias(model, scheme, rows)


def fit_weights(model: Any, rows: list[np.ndarray], services: Services) -> str:
    """Fit queries and keys of the swapped `model` where its scheme rotates, and return what was found, in a sentence.

    Raises:
        UnsupportedSwapError: they miss what a change of basis says.
    """
    if isinstance(model._posswap.plan.scheme, RotaryScheme):
        assert services.fit_rotation is not None
        with _explained("swap.fit", "Or swap.fit=0, which starts without a fit."):
            return str(services.fit_rotation(model, rows))
    return f"the bias of each layer and head fitted to what the table did on {sum(map(len, rows)):,} tokens"


def _explained_centring() -> AbstractContextManager[None]:
    """Have what is refused in the block name the key of the recipe, and the way on."""
    return _explained("swap.centre", "Or swap.centre=false, which leaves the table's mean where it is.")


@contextmanager
def _explained(key: str, instead: str) -> Iterator[None]:
    try:
        yield
    except (UnsupportedSwapError, UnsupportedModelError, SchemeError) as error:
        raise type(error)(f"{key}: {error} {instead}") from error
