"""What a model can run is what its plan declares, and what it then does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_posswap
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.evaluation import Scorer, reach_of
from hf_posswap.schemes import schemes_for

WINDOW, LONG = 16, 64
OPTIONS = {
    "longrope": {"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 3.0, 4.0]},
    "linear": {"factor": 4.0},
}


def llama(rope: dict[str, object] | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=WINDOW, initializer_range=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0} | (rope or {}),
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def swapped(scheme: str) -> PreTrainedModel | None:
    model = llama()
    try:
        hf_posswap.patch_model(model, scheme, max_length=LONG, **OPTIONS.get(scheme, {}))
    except (UnsupportedSwapError, hf_posswap.errors.SchemeError, hf_posswap.errors.OptionError):
        return None
    return model


def prefixes_agree(model: PreTrainedModel) -> bool:
    """Return whether the losses of a short text are those of its place in a long one."""
    ids = torch.randint(0, 50, (2, LONG))
    short = Scorer(model).nll(ids[:, :WINDOW])
    long = Scorer(model).nll(ids)[:, : WINDOW - 1]
    return bool((short - long).abs().max() < 1e-4)


@pytest.mark.parametrize("scheme", sorted(schemes_for("text")))
def test_the_plan_decides_and_the_model_does_as_it_says(scheme: str) -> None:
    model = swapped(scheme)
    if model is None:
        pytest.skip(f"{scheme} takes options, or no Llama")
    reach = reach_of(model)
    assert reach.prefix_consistent == model._posswap.plan.cached_equals_full
    assert (reach.window, reach.why) == (WINDOW, "the plan of its swap")
    assert prefixes_agree(model) == reach.prefix_consistent


def test_schemes_of_both_kinds_are_there() -> None:
    kinds = {reach_of(model).prefix_consistent for name in ("yarn", "dynamic") if (model := swapped(name))}
    assert kinds == {True, False}


def test_a_native_model_is_judged_by_its_rope_type() -> None:
    assert reach_of(llama()).prefix_consistent
    dynamic = reach_of(llama({"rope_type": "dynamic", "factor": 4.0}))
    assert (dynamic.prefix_consistent, dynamic.limit, dynamic.why) == (False, None, "rope type dynamic")


def test_a_table_ends_and_a_longer_one_ends_later(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=WINDOW, n_embd=16, n_layer=1, n_head=2))
    assert reach_of(model).limit == WINDOW
    hf_posswap.patch_model(model, "learned", max_length=LONG)
    assert (reach_of(model).limit, reach_of(model).window) == (LONG, WINDOW)
    hf_posswap.save(model, tmp_path / "saved")
    again = reach_of(hf_posswap.load(tmp_path / "saved"))
    assert (again.limit, again.window) == (LONG, WINDOW)


def test_of_an_unknown_model_nothing_is_assumed() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    reach = reach_of(MambaForCausalLM(config))
    assert (reach.limit, reach.prefix_consistent, reach.why) == (None, False, "no family describes it")
