"""A model that was bfloat16 once, and is float32 again, turns by the angles of its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posswap
from hf_posswap.families.locating import locate
from tests.contract.models import LENGTH
from tests.contract.others import ALL
from tests.contract.pairs import gap, logits, words

IDS = words(2, 2 * LENGTH)
ROTARY = ["llama", "gpt_neox", "falcon", "gemma3 (frequencies by layer type)"]
SCHEMES: dict[str, dict[str, Any]] = {
    "rnope": {"every": 2, "max_length": 2 * LENGTH},
    "rope": {"site": "attention"},
    "self_extend": {"max_length": 2 * LENGTH},
    "rerope": {"max_length": 2 * LENGTH},
    "dual_chunk": {"max_length": 2 * LENGTH},
    "yarn": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
}


def cast_once(model: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    return model.to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROTARY)
def test_geometry_is_that_of_a_model_that_was_never_cast(name: str, dtype: torch.dtype) -> None:
    model = ALL[name].build()
    exact = locate(model).geometry
    assert exact.frequencies is not None
    assert locate(cast_once(model, dtype)).geometry == exact
    assert locate(model.to(dtype)).geometry == exact


def test_a_rotary_module_that_does_not_follow_its_config_keeps_what_it_has() -> None:
    model = ALL["llama"].build()
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert locate(model).geometry.frequencies == tuple(model.model.rotary_emb.inv_freq.tolist())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_swap_before_and_after_saving_is_one(tmp_path: Path, scheme: str) -> None:
    model = cast_once(ALL["llama"].build())
    hf_posswap.patch_model(model, scheme, **SCHEMES[scheme])
    model.save_pretrained(tmp_path)
    assert gap(logits(model, IDS), logits(hf_posswap.load(tmp_path).eval(), IDS)) < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_swapped_model_that_is_cast_later_keeps_its_angles(scheme: str) -> None:
    model = ALL["llama"].build()
    for parameter in model.parameters():  # weights that bfloat16 holds, so that angles alone could change
        parameter.data = parameter.data.bfloat16().float()
    hf_posswap.patch_model(model, scheme, **SCHEMES[scheme])
    before = logits(model, IDS)
    assert gap(logits(cast_once(model), IDS), before) < 1e-6
    assert hf_posswap.verify_swap(cast_once(model)).checks


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_swap_of_a_model_that_was_cast_is_proved(scheme: str) -> None:
    model = cast_once(ALL["llama"].build())
    hf_posswap.patch_model(model, scheme, **SCHEMES[scheme])
    assert hf_posswap.verify_swap(model).checks


def test_rnope_writes_the_angles_of_the_config() -> None:
    model, cast = ALL["llama"].build(), cast_once(ALL["llama"].build())
    for each in (model, cast):
        hf_posswap.patch_model(each, "rnope", **SCHEMES["rnope"])
    assert cast.config.posswap == model.config.posswap
