"""Tables that a swap freezes are frozen in the loaded model, by whatever road, and whatever lies beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_posswap
from hf_posswap import patch_model, swap_plan, verify_swap
from hf_posswap.schemes import Alibi, Fire, Learned, Rope, Scheme, Sinusoidal, T5Bias
from tests.contract.others import ALL
from tests.families import vision_models

BESIDE: dict[str, Scheme] = {
    "rope": Sinusoidal() + Rope(),
    "alibi, ridge-fitted": Sinusoidal(ridge=30.0) + Alibi(),
    "t5": Sinusoidal() + T5Bias(),
    "fire": Sinusoidal() + Fire(),
}


def frozen(model: Any) -> set[str]:
    """Return the names of the parameters that are not trained."""
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def held_frozen(model: Any, folder: Path, expected: set[str]) -> None:
    """Assert that `model`, and what each road loads of it, is frozen at `expected` alone, and stands as planned."""
    model.save_pretrained(folder)
    roads = [hf_posswap.load(folder)]
    if swap_plan(model).route == "plugin":  # transformers' own road leads to the swapped class
        roads.append(type(model).from_pretrained(folder))
    for one in (model, *roads):
        assert frozen(one) == expected
        verify_swap(one)


@pytest.mark.parametrize("scheme", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_formulas_table_beside_a_scheme_inside_stays_frozen(name: str, scheme: Scheme, tmp_path: Path) -> None:
    model = patch_model(ALL[name].build(), scheme)
    (table,) = (path for path in dict(model.named_parameters()) if path.endswith(".old"))
    held_frozen(model, tmp_path, {table})


def test_a_formulas_table_in_one_stack_stays_frozen_beside_another_stacks_scheme(tmp_path: Path) -> None:
    model = patch_model(ALL["bart"].build(), {"encoder": "sinusoidal", "decoder": "rope"})
    assert swap_plan(model).route == "plugin"
    held_frozen(model, tmp_path, {"model.encoder.embed_positions.weight"})


@pytest.mark.parametrize("scheme", [Learned() + Rope(), Sinusoidal()], ids=["trained", "alone"])
def test_what_was_right_stays_right(scheme: Scheme, tmp_path: Path) -> None:
    model = patch_model(ALL["gpt2"].build(), scheme)
    held_frozen(model, tmp_path, {"transformer.wpe.weight"} if scheme.kind == "table" else set())


@pytest.mark.parametrize("scheme", ["nope", "rope_2d", "sinusoidal_2d"])
def test_rows_of_patches_that_are_no_weights_stay_frozen(scheme: str, tmp_path: Path) -> None:
    """SigLIP's table has rows of patches alone: zeros stand for them, or one zero, or a formula's."""
    native = vision_models.build("SiglipVisionModel")
    model = patch_model(native, scheme)
    (table,) = frozen(model)
    assert "position_embedding" in table
    held_frozen(model, tmp_path, {table})


def test_an_auto_class_loads_it_frozen(tmp_path: Path) -> None:
    patch_model(ALL["gpt2"].build(), BESIDE["rope"]).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert frozen(loaded) == {"transformer.wpe.old"}
