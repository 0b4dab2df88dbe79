"""CTRL: sinusoids that are no module and stand in no checkpoint, taken away and put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posswap
from hf_posswap import patch_model, plan_swap, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import SwapVerificationError, UnsupportedSwapError
from hf_posswap.families import locate
from hf_posswap.testing.tiny import TINY_LENGTH, tiny_model
from tests.families.interface_models import words
from tests.families.oracles import penalty, rotated

IDS = words(2, 20)
NOISE = 2e-5


def build(**changes: Any) -> Any:
    return tiny_model("CTRLLMHeadModel", meta=False, n_layer=2, **changes)


def logits(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=NOISE)


def without_positions() -> Any:
    model = build()
    model.transformer.pos_encoding.zero_()
    return model


def test_where_its_table_is() -> None:
    sites = locate(build())
    assert (sites.table_path, sites.geometry.original_length, sites.geometry.causal) == (
        "transformer.pos_encoding", TINY_LENGTH, True)  # fmt: skip


def test_rope_is_a_rotation_of_queries_and_keys() -> None:
    oracle = without_positions()
    rotated(oracle, locate(oracle).main, ("Wq", "Wk"))
    model = build()
    patch_model(model, "rope")
    same(logits(model), logits(oracle, use_cache=False))


def test_alibi_is_an_additive_mask() -> None:
    mask = penalty(4, IDS.shape[1], causal=True).expand(2, -1, -1, -1)
    model = build()
    patch_model(model, "alibi")
    same(logits(model), logits(without_positions(), attention_mask=mask))


@pytest.mark.parametrize("scheme", ["rope", "alibi", "nope"])
def test_it_runs_beyond_its_table_and_comes_back(scheme: str, tmp_path: Path) -> None:
    model, long = build(), words(1, 2 * TINY_LENGTH)
    before, state = logits(model), model.state_dict()
    plan = swap_plan(patch_model(model, scheme, max_length=2 * TINY_LENGTH))
    assert plan.route == "plugin"
    verify_swap(model)
    hf_posswap.save(model, tmp_path)
    loaded = hf_posswap.load(tmp_path)
    assert torch.equal(logits(loaded, long), logits(model, long))
    verify_swap(loaded)
    unpatch_model(model)
    assert list(model.state_dict()) == list(state)
    assert "pos_encoding" in dict(model.transformer.named_buffers())
    assert torch.equal(logits(model), before)


def test_cast_meanwhile_it_comes_back_cast() -> None:
    model, cast = build(), build().to(torch.bfloat16)
    patch_model(model, "rope")
    model.to(torch.bfloat16)
    unpatch_model(model)
    assert model.transformer.pos_encoding.dtype == torch.bfloat16
    same(logits(model).float(), logits(cast).float())


def test_a_table_that_stands_again_is_noticed() -> None:
    model = build()
    patch_model(model, "rope")
    del model.transformer.pos_encoding
    model.transformer.register_buffer("pos_encoding", torch.zeros(TINY_LENGTH, 64), persistent=False)
    with pytest.raises(SwapVerificationError, match="pos_encoding: the position table is still there"):
        verify_swap(model)


def test_schemes_that_need_a_table_in_checkpoints_are_refused() -> None:
    with pytest.raises(UnsupportedSwapError, match="needs a table in checkpoints, and CTRLLMHeadModel computes"):
        plan_swap(build(), "learned")
