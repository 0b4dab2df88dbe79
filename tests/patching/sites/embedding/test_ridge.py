"""Ridge-fitted sinusoidal tables in models: stock classes run them, and undo, loading and blends are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_posswap
from hf_posswap import Blend, finish_blend, patch_model, set_blend, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import SchemeError, SwapVerificationError
from hf_posswap.patching.sites.embedding.table_edits import ReplaceTable
from hf_posswap.schemes import Rope, Sinusoidal
from tests.contract.models import LENGTH, build
from tests.contract.others import ALL
from tests.contract.pairs import gap, logits, words

LONG = 2 * LENGTH
IDS = words(2, LENGTH)
TABLED = ["gpt2", "opt", "bert", "roberta", "albert", "gpt_neo", "distilbert", "longformer", "bart", "marian"]
FITTED = Sinusoidal(ridge=30.0)
"""The rows of random models have nothing to do with one another: a small penalty follows each, and explodes beyond."""


def tables(model: Any) -> dict[str, ReplaceTable]:
    """Return the edits of the model's tables, by their paths."""
    return {edit.path: edit for edit in swap_plan(model).edits if isinstance(edit, ReplaceTable)}


def native_rows(name: str) -> dict[str, torch.Tensor]:
    """Return the state dict of a fresh model, copied."""
    return {key: value.clone() for key, value in ALL[name].build().state_dict().items()}


def fitted_rows(old: torch.Tensor, rows: int, ridge: float) -> torch.Tensor:
    """Return S W + m by numpy's normal equations, from the paper's interleaved sines and cosines."""
    table = old.double().numpy()
    count, width = table.shape
    angles = np.arange(max(rows, count))[:, None] / 10000.0 ** (np.arange(0, width, 2) / width)
    features = np.empty((len(angles), width))
    features[:, 0::2], features[:, 1::2] = np.sin(angles), np.cos(angles)
    inside, mean = features[:count], table.mean(axis=0)
    weights = np.linalg.inv(inside.T @ inside + ridge * np.eye(width)) @ inside.T @ (table - mean)
    return torch.from_numpy(features[:rows] @ weights + mean).float()


@pytest.mark.parametrize("name", TABLED)
def test_every_family_with_a_table_takes_the_fit_natively(name: str, tmp_path: Path) -> None:
    before, model = native_rows(name), ALL[name].build()
    patch_model(model, FITTED, max_length=LONG)
    assert swap_plan(model).route == "native"
    assert tables(model)
    for path, edit in tables(model).items():
        old, new = before[f"{path}.weight"], model.get_submodule(path).weight
        assert torch.equal(new[: edit.offset], old[: edit.offset])  # OPT's two rows, RoBERTa's padding
        torch.testing.assert_close(
            new[edit.offset :].detach(), fitted_rows(old[edit.offset :], edit.rows, 30.0), rtol=0, atol=1e-5
        )
        assert not new.requires_grad
    verify_swap(model)
    model.save_pretrained(tmp_path)
    loaded, stock = hf_posswap.load(tmp_path).eval(), ALL[name].stock.from_pretrained(tmp_path).eval()
    long = words(2, LONG)
    given = {"decoder_input_ids": long} if model.config.is_encoder_decoder else {}
    assert gap(logits(stock, long, **given), logits(model, long, **given)) == 0
    assert gap(logits(loaded, long, **given), logits(model, long, **given)) == 0
    verify_swap(loaded)
    assert swap_plan(loaded).schemes == swap_plan(model).schemes
    for path in tables(model):
        assert torch.equal(loaded.get_submodule(path).weight, model.get_submodule(path).weight)
    unpatch_model(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_each_stack_is_fitted_to_its_own_table() -> None:
    model = ALL["bart"].build()
    patch_model(model, FITTED, max_length=LONG)
    encoder, decoder = (swap_plan(model).schemes[name] for name in ("encoder", "decoder"))
    assert encoder.residual != decoder.residual  # type: ignore[attr-defined]


def test_the_plan_says_what_the_fit_finds_and_touches_nothing() -> None:
    before, model = native_rows("gpt2"), build("gpt2")
    plan = hf_posswap.plan_swap(model, FITTED, max_length=LONG)
    said = str(plan)
    assert "ridge-fitted to the old table, with a residual of" in said
    assert "times as long as the longest inside" in said
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert plan == swap_plan(patch_model(model, FITTED, max_length=LONG))


def test_rows_that_explode_leave_the_model_as_it_was() -> None:
    before, model = native_rows("gpt2"), build("gpt2")
    with pytest.raises(SchemeError, match=r"ridge=1e-05 rows beyond the old table are up to .* Give a larger ridge"):
        patch_model(model, "sinusoidal", ridge=1e-5, max_length=4 * LENGTH)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("change", ["scaled", "reordered", "zero"])
def test_verify_swap_finds_rows_that_no_fit_made(change: str) -> None:
    model = patch_model(build("gpt2"), FITTED, max_length=LONG)
    rows = model.transformer.wpe.weight
    changed = {"scaled": 1.5 * rows, "reordered": torch.cat((rows[::2], rows[1::2])), "zero": 0 * rows}[change]
    with torch.no_grad():
        rows.copy_(changed)
    with pytest.raises(SwapVerificationError, match="differs from its formula"):
        verify_swap(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_model_still_verifies(dtype: torch.dtype) -> None:
    model = patch_model(build("gpt2").to(dtype), FITTED, max_length=LONG)
    verify_swap(model)
    verify_swap(model.float())
    verify_swap(patch_model(build("gpt2"), FITTED, max_length=LONG).to(dtype))


def test_weights_on_meta_are_planned_and_not_written() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    assert "will be ridge-fitted to the old table" in str(hf_posswap.plan_swap(model, FITTED))
    with pytest.raises(SchemeError, match="needs a value from the old table's weights, and this model's are on meta"):
        patch_model(model, FITTED)
    shape = hf_posswap.plan_swap(build("gpt2", n_embd=8, n_head=2, n_positions=16), FITTED).scheme
    assert patch_model(model, shape).transformer.wpe.weight.is_meta  # the rows come from a checkpoint


def test_a_blend_ends_at_the_rows_of_the_fit() -> None:
    old = native_rows("gpt2")["transformer.wpe.weight"]
    model = patch_model(build("gpt2"), Blend(new=FITTED))
    set_blend(model, 1.0)
    blended = logits(model, IDS)
    finish_blend(model)
    assert gap(logits(model, IDS), blended) == 0
    rows = model.transformer.wpe.weight.detach()
    torch.testing.assert_close(rows, fitted_rows(old, LENGTH, 30.0), rtol=0, atol=1e-5)
    verify_swap(model)


def test_beside_a_rotation_the_rows_come_back_and_the_class_makes_a_fresh_one(tmp_path: Path) -> None:
    model = patch_model(build("gpt2"), FITTED + Rope(), max_length=LONG)
    model.save_pretrained(tmp_path)
    loaded = hf_posswap.load(tmp_path).eval()
    assert gap(logits(loaded, words(2, LONG)), logits(model, words(2, LONG))) == 0
    fresh = type(model)(model.config)  # its table is random, and then made of the record's size
    assert swap_plan(fresh).scheme == swap_plan(model).scheme
