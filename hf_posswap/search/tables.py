"""What a fit to a learned position table needs of the model and of the texts."""

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
"""A swap that leaves the table to act and gives access to the scores."""


def check_table(model: Any, scheme: Scheme, owner: str) -> Sites:
    """Return the sites of `model`, which has a learned position table and nothing else, and can be swapped to `scheme`.

    Raises:
        UnsupportedSwapError: the model has no learned table, another mechanism beside it, several stacks, or nothing
            can be put inside its attention.
        UnsupportedModelError: no family describes it, or its weights are on meta.
        AlreadyPatchedError: it carries a swap.
    """
    plan = plan_swap(model, scheme)
    sites, name = plan.sites, type(model).__name__
    table, beside = sites.main.table, sites.main.inside is not None or plan.record.relative is not None
    if len(sites.stacks) > 1 or model.config.is_encoder_decoder:
        raise UnsupportedSwapError(f"{owner} fits models of one stack, and {name} is an encoder and a decoder.")
    if not isinstance(table, TokenTable) or table.computed or beside:
        has = "other positions beside it" if table is not None and beside else "none"
        raise UnsupportedSwapError(
            f"{owner} fits to what a learned position table does, and {name} has {has}. What works: GPT-2, OPT, BERT, "
            "RoBERTa and their kind."
        )
    if sites.main.spec.layers_share and len(sites.main.attention) < model.config.num_hidden_layers:
        raise UnsupportedSwapError(shared_layers(name))
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError(f"{owner} runs the model, and its weights are on meta: load it with its weights.")
    plan_swap(model, BESIDE_TABLE)
    return sites


def shared_layers(name: str) -> str:
    """Return what is wrong with the layers of a model of the class called `name` that do not run once each."""
    return (
        f"the attention layers of {name} do not run once in a forward each, so that what their scores are cannot be "
        "told: layers that share their weights have one bias in common."
    )


def check_rows(tokens: Any, model: Any, sites: Sites) -> list[np.ndarray]:
    """Return `tokens` as rows of token ids that the table of `model` reaches.

    Raises:
        DataError: they are no rows of the model's token ids, too long, padded, or all too short to compare.
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
        raise DataError("tokens has rows of one token alone: a fit compares two keys of a query; give longer rows.")
    return rows
