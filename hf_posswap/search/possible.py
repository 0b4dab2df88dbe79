"""Whether a swap could begin fitted to the table that it takes away, said before anything is touched or read."""

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
    """Refuse a fit that could not be made as `model` is swapped to `scheme`, by `fit_bias` or by `fit_rotation`.

    Args:
        model: not swapped; it is only looked at.
        scheme: resolved where it rotates, as the plan of the swap has it.

    Raises:
        SchemeError: the scheme has nothing that is fitted, says itself what the fit finds, or turns whole heads.
        UnsupportedSwapError, UnsupportedModelError: the model has no table that it could be fitted to, or other
            projections than a fit needs.

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
            f"nothing of {scheme.name} is fitted to a table; what is: alibi, t5, and rope and its kind with partial "
            "below 1."
        )
