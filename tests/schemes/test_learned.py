"""Extended learned tables against each rule's definition, in plain Python loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model, plan_swap, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import SchemeError, UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import Learned
from hf_posswap.schemes.common.table import TableScheme

Geometries = Callable[..., Geometry]
WIDTH = 3

OLD = st.integers(1, 24)
MORE = st.integers(0, 60)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def extended(rule: str, old: torch.Tensor, rows: int, geometry: Geometries, alpha: float = 0.4) -> torch.Tensor:
    shape = geometry(hidden_size=WIDTH, original_length=old.shape[0])
    scheme = Learned(extend=rule, alpha=alpha).resolve(shape, rows).fit(old, len(old), shape)
    assert scheme.rows(shape, rows) == rows
    new = scheme.table(old, rows, shape)
    assert new.shape == (rows, WIDTH)
    return new


def test_a_table_scheme_without_a_table_says_what_it_lacks(geometry: Geometries) -> None:
    class Empty(TableScheme):
        name = "empty"

    with pytest.raises(NotImplementedError, match="Empty defines neither table nor rows_at"):
        Empty().table(torch.zeros(2, WIDTH), 4, geometry(hidden_size=WIDTH))


@given(count=OLD, more=MORE, dtype=DTYPES)
def test_tile_repeats_the_old_rows(geometry: Geometries, count: int, more: int, dtype: torch.dtype) -> None:
    old = torch.randn(count, WIDTH, dtype=torch.float64).to(dtype)
    new = extended("tile", old, count + more, geometry)
    assert new.tolist() == [old[p % count].tolist() for p in range(count + more)]


@given(count=OLD, more=MORE, dtype=DTYPES)
def test_group_repeats_each_row_in_place(geometry: Geometries, count: int, more: int, dtype: torch.dtype) -> None:
    old = torch.randn(count, WIDTH, dtype=torch.float64).to(dtype)
    rows = count + more
    new = extended("group", old, rows, geometry)
    assert new.tolist() == [old[math.floor(p / Fraction(rows, count))].tolist() for p in range(rows)]


@given(count=OLD, more=MORE)
def test_interpolate_equals_exact_fractions(geometry: Geometries, count: int, more: int) -> None:
    old = torch.randn(count, WIDTH)
    rows = count + more
    new = extended("interpolate", old, rows, geometry)
    for position in range(rows):
        place = Fraction(position * count, rows)  # new[k p] = old[p]
        low = math.floor(place)
        high = min(low + 1, count - 1)
        part = float(place - low)
        for column in range(WIDTH):
            expected = (1 - part) * old[low, column].item() + part * old[high, column].item()
            assert new[position, column].item() == pytest.approx(expected, abs=1e-6)
        if place == low:
            assert torch.equal(new[position], old[low])


@given(count=st.integers(1, 9), more=MORE, alpha=st.floats(0.05, 0.95).filter(lambda a: abs(a - 0.5) > 0.01))
def test_hierarchical_equals_the_papers_formula(geometry: Geometries, count: int, more: int, alpha: float) -> None:
    old = torch.randn(count, WIDTH)
    rows = min(count + more, count * count)
    new = extended("hierarchical", old, rows, geometry, alpha)
    for position in range(rows):
        for column in range(WIDTH):
            basis = [(x - alpha * old[0, column].item()) / (1 - alpha) for x in old[:, column].tolist()]
            expected = alpha * basis[position // count] + (1 - alpha) * basis[position % count]
            assert new[position, column].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("rule", ["tile", "hierarchical", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.9])
def test_the_first_rows_stay_bit_by_bit(geometry: Geometries, rule: str, dtype: torch.dtype, alpha: float) -> None:
    old = torch.randn(17, WIDTH, dtype=torch.float64).to(dtype)
    new = extended(rule, old, 100, geometry, alpha)
    assert torch.equal(new[:17].to(dtype), old)


@pytest.mark.parametrize("rule", ["tile", "interpolate", "group", "hierarchical", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_table_kept_at_its_length_is_itself_and_a_copy(geometry: Geometries, rule: str, dtype: torch.dtype) -> None:
    old = torch.nn.Parameter(torch.randn(9, WIDTH, dtype=torch.float64).to(dtype))
    new = extended(rule, old, 9, geometry)
    assert torch.equal(new.to(dtype), old)
    assert not new.requires_grad
    assert new.data_ptr() != old.data_ptr()


def test_hierarchical_gives_every_position_a_row_of_its_own(geometry: Geometries) -> None:
    new = extended("hierarchical", torch.randn(8, WIDTH), 64, geometry)
    assert len({tuple(row) for row in new.tolist()}) == 64


def test_without_a_max_length_the_table_keeps_its_length(geometry: Geometries) -> None:
    shape = geometry()
    assert Learned().resolve(shape, None).rows(shape, None) == 128


def test_a_shorter_table_is_refused(geometry: Geometries) -> None:
    with pytest.raises(SchemeError, match=r"max_length 64 is shorter than the model's 128 positions; leave"):
        Learned().resolve(geometry(), 64)


def test_hierarchical_ends_at_the_square(geometry: Geometries) -> None:
    shape = geometry(original_length=8)
    Learned(extend="hierarchical").resolve(shape, 64)
    with pytest.raises(SchemeError, match=r"reaches 64 positions from 8, but max_length is 65; give a smaller one, or"):
        Learned(extend="hierarchical").resolve(shape, 65)
    Learned(extend="tile").resolve(shape, 65)


@pytest.mark.parametrize("rule", ["random", "reinit"])
def test_drawn_rows_are_normal_with_the_spread_of_the_old_table(geometry: Geometries, rule: str) -> None:
    old = 0.7 * torch.randn(8, 64)
    shape = geometry(hidden_size=64, original_length=8)
    fitted = Learned(extend=rule).resolve(shape, 4000).fit(old, len(old), shape)
    assert fitted.std == pytest.approx(np.std(old.numpy(), dtype=np.float64), rel=1e-6)
    new = fitted.table(old, 4000, shape).numpy()
    drawn = new[8:] if rule == "random" else new
    assert stats.kstest(drawn.ravel() / fitted.std, "norm").pvalue > 0.01
    given = Learned(extend=rule, std=3.0).fit(old, len(old), shape)
    assert given.std == 3.0
    assert given.table(old, 4000, shape)[8:].std().item() == pytest.approx(3.0, rel=0.01)


def test_reinit_keeps_nothing_and_the_seed_decides(geometry: Geometries) -> None:
    old, shape = torch.randn(9, WIDTH), geometry(hidden_size=WIDTH, original_length=9)
    state = torch.get_rng_state()
    tables = [Learned(extend="reinit", seed=seed).fit(old, len(old), shape).table(old, 9, shape) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(tables[0], tables[1])
    assert not (tables[0] == tables[2]).any()
    assert not (tables[0] == old).any()


def test_an_empty_table_is_drawn_with_the_usual_spread(geometry: Geometries) -> None:
    shape = geometry(hidden_size=WIDTH, original_length=9)
    assert Learned(extend="reinit").fit(torch.zeros(9, WIDTH), 9, shape).std == 0.02


def test_a_broken_table_gives_no_spread(geometry: Geometries) -> None:
    old, shape = torch.full((9, WIDTH), torch.nan), geometry(hidden_size=WIDTH, original_length=9)
    with pytest.raises(SchemeError, match="whose spread drawn rows would take, has NaN or infinite values; repair it"):
        Learned(extend="random").fit(old, len(old), shape)
    assert Learned(extend="random", std=1.0).fit(old, len(old), shape).std == 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"std": 0.0, "extend": "random"}, "std must be a finite number > 0, got 0.0"),
        ({"std": math.nan, "extend": "random"}, "std must be a finite number > 0, got nan"),
        (
            {"std": 0.1},
            "std applies to drawn rows, but extend='tile' draws none; leave it out, or give extend='random' or",
        ),
        ({"seed": -1}, "seed must be a whole number from 0 to"),
        ({"extend": "randomly"}, "extend must be one of 'tile', .*'random', 'reinit', got 'randomly'"),
    ],
)
def test_impossible_drawing_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemeError, match=says):
        Learned(**options)


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)).eval()


def test_a_model_with_drawn_rows() -> None:
    model, ids = gpt2(), torch.arange(16)[None] % 11
    before, old = model(ids).logits, model.transformer.wpe.weight.detach().clone()
    plan = swap_plan(patch_model(model, "learned", extend="random", max_length=40, seed=3))
    assert (plan.route, plan.adaptation.split(":")[0]) == ("native", "for use beyond the original window")
    assert plan.scheme.std == pytest.approx(old.std(correction=0).item())  # the record says what was drawn from
    assert torch.equal(model(ids).logits, before)
    assert model.transformer.wpe.weight.requires_grad
    verify_swap(model)
    unpatch_model(model)
    plan = swap_plan(patch_model(model, "learned", extend="reinit"))
    assert plan.adaptation == "required: fine-tuning, as every position vector changes"
    assert (model(ids).logits - before).abs().max() > 1e-3
    verify_swap(model)
    assert torch.equal(unpatch_model(model)(ids).logits, before)


def test_where_there_is_no_table_or_no_weights_it_is_refused() -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=11)
    with pytest.raises(UnsupportedSwapError, match="learned needs a position table, and LlamaForCausalLM"):
        plan_swap(LlamaForCausalLM(config), "learned", extend="random")
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    with pytest.raises(SchemeError, match="needs a value from the old table's weights, and this model's are on meta"):
        patch_model(model, "learned", extend="random", max_length=40)
