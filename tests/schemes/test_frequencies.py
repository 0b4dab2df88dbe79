"""Rope with angles of one's own: taken as given, said in a stock config where every pair turns, refused where wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from hf_posswap import patch_model, plan_swap, swap_plan
from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import Rope, Scheme, Yarn
from hf_posswap.testing.tiny import tiny_model
from tests.schemes import small

Geometries = Callable[..., Geometry]
IDS = torch.arange(1, 41)[None]


def llama(base: float = 10000.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": base}
    return LlamaForCausalLM(small.llama(rope_parameters=rope)).eval()


def logits(model: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, **kwargs).logits


@given(numbers=st.lists(st.floats(0.0, 6.0), min_size=8, max_size=8))
def test_they_are_taken_as_given(geometry: Geometries, numbers: list[float]) -> None:
    shape = geometry()
    scheme = Rope(frequencies=numbers).resolve(shape, 4096)
    assert scheme.angles(shape).inv_freq.tolist() == torch.tensor(numbers).tolist()
    assert scheme.angles(shape).attention_factor == 1.0
    assert (scheme.native_rope(shape) is None) == (torch.tensor(numbers).min().item() == 0.0)
    assert scheme.resolve(shape, 4096) == scheme
    assert not scheme.traits.training_free


@pytest.mark.parametrize("site", ["auto", "attention"])
def test_another_base_written_out_is_a_llama_of_that_base(site: Any) -> None:
    model, other = llama(), llama(500.0)
    plan = swap_plan(patch_model(model, "rope", frequencies=[500.0 ** (-pair / 8) for pair in range(8)], site=site))
    assert plan.route == ("native" if site == "auto" else "plugin")
    torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=5e-5)
    assert (logits(model) - logits(llama())).abs().max() > 0.1


def test_pairs_that_do_not_turn_need_the_plugin() -> None:
    model = llama()
    assert swap_plan(patch_model(model, "rope", frequencies=[1.0, 0.5] + [0.0] * 6)).route == "plugin"
    still = llama()
    patch_model(still, "rope", frequencies=[0.0] * 8)
    nope = llama()
    patch_model(nope, "nope")
    torch.testing.assert_close(logits(still), logits(nope), rtol=0, atol=5e-5)
    assert (logits(still) - logits(model)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "route"),
    [
        ("LlamaForCausalLM", "plugin"),  # its code turns whole heads, whatever its config says
        ("Gemma2ForCausalLM", "plugin"),
        ("GPTNeoXForCausalLM", "native"),
        ("Phi3ForCausalLM", "native"),
    ],
)
@pytest.mark.parametrize("scheme", [Rope(partial=0.5, base=500.0), Yarn(partial=0.5, factor=4.0)], ids=["rope", "yarn"])
def test_heads_of_which_a_part_turns_are_native_where_the_code_can_turn_a_part(
    name: str, route: str, scheme: Scheme
) -> None:
    model = tiny_model(name, meta=False).eval()
    pair = patch_model(copy.deepcopy(model), scheme), patch_model(model, scheme, site="attention")
    assert [swap_plan(model).route for model in pair] == [route, "plugin"]
    torch.testing.assert_close(logits(pair[0]), logits(pair[1]), rtol=0, atol=5e-5)


def test_lists_of_the_wrong_length(geometry: Geometries) -> None:
    with pytest.raises(SchemeError, match=r"rope: frequencies needs one number for each of .* 8 rotary pairs, got 3\."):
        Rope(frequencies=[1.0, 0.1, 0.01]).resolve(geometry(), None)
    assert Rope(frequencies=[1.0, 0.1], partial=0.25).resolve(geometry(), None).rotary_dim(geometry()) == 4


def test_angles_of_one_s_own_are_not_called_the_same_mechanism() -> None:
    plan = plan_swap(llama(), "rope", frequencies=[0.5] * 8)
    assert plan.adaptation.startswith("required")
    assert plan_swap(llama(), "rope").adaptation.startswith("none within the original window")
    assert plan_swap(llama(), "rope", partial=0.5).adaptation.startswith("required")
    assert plan_swap(llama(), "rope", base=5e5).adaptation.startswith("optional")
