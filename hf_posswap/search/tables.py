"""Requirements of a fit to a learned position table for the model and the texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_posswap.errors import DataError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families.sites import Sites, TokenTable
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.schemes import Learned
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.base import Scheme
from hf_posswap.search.documents import token_rows
from hf_posswap.text.tokens import check_token_ids

BESIDE_TABLE = Learned() + Alibi()
"""A swap that keeps the table active and gives access to the scores."""


def check_table(model: Any, scheme: Scheme, owner: str, *, runs: bool = True) -> Sites:
    """Return the sites of `model`, which has a learned position table and nothing else, and can be swapped to `scheme`.

    Args:
        model: unswapped.
        scheme: to fit.
        owner: the function of which errors speak.
        runs: whether the model is run now, for which it needs its weights; False: they may be on meta.

    Raises:
        UnsupportedSwapError: the model has no learned table, another mechanism in addition to it, several stacks, or
            its attention cannot be patched.
        UnsupportedModelError: no family describes it, or its weights are on meta.
        AlreadyPatchedError: it carries a swap.
    """
    plan = plan_swap(model, scheme)
    sites, name = plan.sites, type(model).__name__
    table, has_other_positions = sites.main.table, sites.main.inside is not None or plan.record.relative is not None
    if len(sites.stacks) > 1 or model.config.is_encoder_decoder:
        raise UnsupportedSwapError(f"{owner} fits models of one stack, and {name} is an encoder and a decoder.")
    if not isinstance(table, TokenTable) or table.computed or has_other_positions:
        positions_text = "other positions in addition to it" if table is not None and has_other_positions else "none"
        raise UnsupportedSwapError(
            f"{owner} fits to the effect of a learned position table, and {name} has {positions_text}. What works: "
            "GPT-2, OPT, BERT, RoBERTa and similar models."
        )
    if sites.main.spec.layers_share and len(sites.main.attention) < model.config.num_hidden_layers:
        raise UnsupportedSwapError(shared_layers(name))
    if runs and any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError(f"{owner} runs the model, and its weights are on meta: load it with its weights.")
    plan_swap(model, BESIDE_TABLE)
    return sites


def shared_layers(name: str) -> str:
    """Return the error message for a model of class `name` whose layers do not run exactly once each."""
    return (
        f"the attention layers of {name} do not run exactly once per forward, so their scores cannot be attributed: "
        "layers that share weights share one bias."
    )


def check_rows(tokens: Any, model: Any, sites: Sites) -> list[np.ndarray]:
    """Return `tokens` as rows of token ids within the table of `model`.

    Raises:
        DataError: they are not rows of the model's token ids, too long, padded, or all too short to compare.
    """
    rows, length = token_rows(tokens), sites.geometry.original_length
    for index, row in enumerate(rows):
        check_token_ids(model, row)
        if len(row) > length:
            raise DataError(f"tokens[{index}] has {len(row)} tokens, and the position table ends at {length}; cut it.")
        padding = sites.main.padding_id
        if padding is not None and (row == padding).any():
            raise DataError(f"tokens[{index}] holds padding (id {padding}), which positions skip; leave it out.")
    if max(map(len, rows)) < 2:
        raise DataError("tokens has only rows of one token, and a fit compares two keys of a query: give longer rows.")
    return rows
