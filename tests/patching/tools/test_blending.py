"""The gradual swap, from the old model to the new one, on whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_posswap
from hf_posswap import Blend, finish_blend, patch_model, set_blend, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import NotPatchedError, PositionRangeError, SchemeError, UnsupportedSwapError
from hf_posswap.schemes import Alibi, Kerple, Learned, Linear, NoPE, Rope, Scheme, Sinusoidal, T5Bias
from tests.contract.models import LENGTH, TINY, build
from tests.contract.pairs import CHANGE, gap, logits, words

IDS = words(2, LENGTH - 2)
NEW: list[Scheme] = [
    Rope(base=500.0),
    Linear(factor=2),
    Alibi(),
    Kerple(),
    NoPE(),
    Sinusoidal(),
    Learned(extend="reinit"),
]
CASES = [
    (model, new)
    for model in ("gpt2", "opt", "bert", "roberta", "llama", "gpt_neox", "glm")
    for new in NEW
    if not (model in ("bert", "roberta") and new.name == "nope")
    and not (model in ("llama", "gpt_neox", "glm") and new.kind == "table")
]


@pytest.mark.parametrize(("name", "new"), CASES, ids=str)
def test_it_begins_as_the_old_model_and_ends_as_the_new_one(name: str, new: Scheme) -> None:
    model, other = build(name), build(name)
    old = logits(model, IDS)
    patch_model(other, new)
    expected = logits(other, IDS)
    plan = swap_plan(patch_model(model, Blend(new=new)))
    assert plan.route == "plugin"
    assert gap(logits(model, IDS), old) == 0
    verify_swap(model)
    set_blend(model, 0.5)
    between = logits(model, IDS)
    assert gap(between, old) > CHANGE
    assert gap(between, expected) > CHANGE
    verify_swap(model)
    set_blend(model, 1.0)
    assert gap(logits(model, IDS), expected) == 0
    verify_swap(model)
    assert finish_blend(model) is model
    assert swap_plan(model).scheme == other._posswap.plan.scheme  # type: ignore[attr-defined]
    assert model.config.to_dict() == other.config.to_dict()
    assert gap(logits(model, IDS), expected) == 0
    unpatch_model(model)
    assert gap(logits(model, IDS), old) == 0


def trained(model: Any) -> None:
    """Move every parameter that is trained."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


@pytest.mark.parametrize("new", [Kerple(), T5Bias(init_std=0.5), Learned(extend="reinit")], ids=str)
def test_what_the_new_mechanism_learned_stays(new: Scheme, tmp_path: Path) -> None:
    model = build("gpt2")
    patch_model(model, Blend(new=new, weight=0.5))
    trained(model)
    model.save_pretrained(tmp_path / "half")
    model = hf_posswap.load(tmp_path / "half")  # a training that goes on from a checkpoint
    set_blend(model, 1.0)
    expected = logits(model, IDS)
    finish_blend(model, max_length=None if new.kind == "table" else 2 * LENGTH)
    assert gap(logits(model, IDS), expected) == 0
    model.save_pretrained(tmp_path / "whole")
    assert gap(logits(hf_posswap.load(tmp_path / "whole"), IDS), expected) == 0


def test_the_weight_is_saved_and_loaded(tmp_path: Path) -> None:
    for name in ("gpt2", "llama"):
        model = build(name)
        patch_model(model, Blend(new=Rope(base=77.0)))
        set_blend(model, 0.375)
        model.save_pretrained(tmp_path / name)
        loaded = hf_posswap.load(tmp_path / name)
        assert loaded.config.posswap["scheme"]["weight"] == 0.375
        assert gap(logits(loaded, IDS), logits(model, IDS)) == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_lora_trained_on_the_way_goes_through() -> None:
    model = get_peft_model(build("gpt2"), LoraConfig(target_modules=list(TINY["gpt2"].projections), modules_to_save=[]))
    patch_model(model, Blend(new=Rope()))
    trained(model)
    set_blend(model, 1.0)
    expected = logits(model, IDS)
    finish_blend(model)
    assert gap(logits(model, IDS), expected) == 0


def test_past_the_old_table_it_says_so_until_the_end() -> None:
    model = build("gpt2")
    patch_model(model, Blend(new=Rope(), weight=1.0))
    with pytest.raises(PositionRangeError, match=f"ends at {LENGTH}"):
        logits(model, words(1, LENGTH + 1))
    finish_blend(model, max_length=2 * LENGTH)
    assert torch.isfinite(logits(model, words(1, 2 * LENGTH))).all()


def test_blending_without_a_blend_is_refused() -> None:
    model = build("gpt2")
    for call in (lambda: set_blend(model, 0.5), lambda: finish_blend(model)):
        with pytest.raises(NotPatchedError, match=r"carries no swap: patch_model\(model, Blend\(\.\.\.\)\) first"):
            call()
    patch_model(model, "alibi")
    with pytest.raises(NotPatchedError, match="carries alibi"):
        set_blend(model, 0.5)
    unpatch_model(model)
    patch_model(model, Blend(new=Alibi(), weight=0.5))
    before = logits(model, IDS)
    with pytest.raises(SchemeError, match="blend is at weight 0.5: ending it now"):
        finish_blend(model)
    for weight in (-0.1, 1.5, float("nan"), "half"):
        with pytest.raises(SchemeError, match="weight must be a finite number >= 0 and <= 1"):
            set_blend(model, weight)  # type: ignore[arg-type]
    assert gap(logits(model, IDS), before) == 0


def test_a_table_cannot_fade_into_a_model_without_one() -> None:
    with pytest.raises(UnsupportedSwapError, match="sinusoidal needs a position table"):
        patch_model(build("llama"), Blend(new=Sinusoidal()))
    with pytest.raises(UnsupportedSwapError, match="site='attention' was requested"):
        patch_model(build("gpt2"), Blend(new=Sinusoidal()), site="attention")


def test_an_end_that_fails_leaves_the_blend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gpt2")
    patch_model(model, Blend(new=Kerple(), weight=1.0))
    trained(model)
    before = logits(model, IDS)
    with pytest.raises(SchemeError, match="the maximum is"):
        finish_blend(model, max_length=2**40)
    assert gap(logits(model, IDS), before) == 0
    verify_swap(model)
