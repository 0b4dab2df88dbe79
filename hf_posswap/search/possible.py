"""Checks whether a swap can be fitted to the table that it replaces, before anything is changed or read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posswap.errors import SchemeError
from hf_posswap.schemes import Scheme
from hf_posswap.schemes.common.bias import LinearBias
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.search.bias import check_bias
from hf_posswap.search.rotation import check_rotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_fit(model: PreTrainedModel, scheme: Scheme) -> None:
    """Check that `fit_bias` or `fit_rotation` can fit a swap of `model` to `scheme`.

    Args:
        model: the unswapped model, which may be on meta; it is not changed.
        scheme: the scheme; resolved, as in the plan of the swap, if it rotates.

    Raises:
        SchemeError: the scheme cannot be fitted, sets a field that the fit determines, or rotates whole heads.
        UnsupportedSwapError, UnsupportedModelError: the model has no table to fit to, or unsupported projections.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.schemes import Alibi
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> check_fit(model, Alibi())
    """
    if isinstance(scheme, RotaryScheme):
        check_rotation(model, scheme)
    elif isinstance(scheme, LinearBias):
        check_bias(model, scheme)
    else:
        raise SchemeError(
            f"{scheme.name} cannot be fitted to a table. What works: alibi, t5, and rope and its variants with partial "
            "below 1."
        )
