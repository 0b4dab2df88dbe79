"""Training a swapped model: gradients, checkpointing, LoRA before and after."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from hf_posswap import patch_model, unpatch_model, verify_swap
from tests.contract.models import LENGTH
from tests.contract.others import ALL
from tests.contract.pairs import CHANGE, NOISE, Pair, gap, once, words
from tests.contract.test_swap import tables_of

IDS = words(2, LENGTH - 2)
ROUNDED = ("longformer", "led")
"""Models whose own code, in place on what a projection gave, rounds otherwise beside an adapter that is off."""


def gradients(model: Any, pair: Pair, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Return the gradient of every trained parameter after one loss."""
    model.train()
    model.zero_grad()
    given = pair.given(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
    model(**given, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@once
def test_gradients_reach_all_that_the_plan_keeps(pair: Pair) -> None:
    reached = gradients(pair.swapped(), pair)
    expected = {name for name, grad in gradients(pair.native(), pair).items() if grad.any()}
    expected = (expected | set(pair.plan.added)) - set(pair.plan.unused)
    expected = {name for name in expected if "(" not in name}  # rows of a table that is there already
    if not getattr(pair.plan.scheme, "trainable", True):
        tables = tables_of(pair)
        expected -= tables
        assert not tables & set(reached)
    assert {name for name, grad in reached.items() if grad.any()} >= expected
    assert all(torch.isfinite(grad).all() for grad in reached.values())


@pytest.mark.few
@once
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(pair: Pair, reentrant: bool) -> None:
    model = pair.swapped()
    expected = gradients(model, pair, use_cache=False) if pair.causal else gradients(model, pair)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    if not model.supports_gradient_checkpointing:  # the native class, and the swapped one with it
        with pytest.raises(ValueError, match="does not support"):
            enable({"use_reentrant": reentrant})
        return
    enable({"use_reentrant": reentrant})
    found = gradients(model, pair, use_cache=False) if pair.causal else gradients(model, pair)
    assert set(found) == set(expected)
    for name, grad in expected.items():
        assert gap(found[name], grad) <= 1e-5 * (1 + float(grad.abs().max())), name
    assert gap(pair.logits(model.eval(), IDS), pair.logits(pair.specimen(), IDS)) == 0


def with_lora(model: Any, name: str) -> Any:
    """Return a PEFT model around `model`; the same adapter every time."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(ALL[name].projections),
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
    )
    return peft.get_peft_model(model, config).eval()


@pytest.mark.few
@once
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_lora_before_and_after_the_swap_is_the_same(pair: Pair) -> None:
    native = with_lora(pair.native(), pair.model)
    untouched = pair.logits(native, IDS)
    before = with_lora(pair.native(), pair.model)
    pair.patch(before)
    after = with_lora(pair.swapped(), pair.model)
    expected = pair.logits(before, IDS)
    assert gap(pair.logits(after, IDS), expected) == 0
    assert gap(expected, pair.logits(pair.specimen(), IDS)) > CHANGE, "the adapter does nothing"
    merged = copy.deepcopy(after).merge_and_unload()
    assert gap(pair.logits(merged, IDS), expected) < pair.noise
    assert gap(pair.logits(before.merge_and_unload(), IDS), expected) < pair.noise
    with after.disable_adapter():
        off = gap(pair.logits(after, IDS), pair.logits(pair.specimen(), IDS))
    assert off <= (NOISE if pair.model in ROUNDED else 0)
    unpatch_model(after)
    assert gap(pair.logits(after, IDS), untouched) == 0


@once
@pytest.mark.pairs(lambda pair: pair.learns)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_peft_trains_and_saves_what_a_scheme_learns(pair: Pair, tmp_path: Path) -> None:
    config = peft.LoraConfig(
        target_modules=list(pair.tiny.projections),
        modules_to_save=["posswap"],
        fan_in_fan_out=pair.model == "gpt2",
    )
    model = peft.get_peft_model(pair.swapped(), config)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and "posswap" in n}
    assert len(trained) == len(pair.plan.added)
    reached = gradients(model, pair)
    assert all(reached[name].any() for name in trained)
    torch.optim.SGD(trained.values(), lr=0.5).step()
    after = pair.logits(model.eval(), IDS)
    assert gap(after, pair.logits(pair.specimen(), IDS)) > NOISE
    verify_swap(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(pair.swapped(), tmp_path).eval()
    assert gap(pair.logits(again, IDS), after) == 0
    with model.disable_adapter():
        assert gap(pair.logits(model, IDS), pair.logits(pair.specimen(), IDS)) == 0
    assert gap(pair.logits(model.merge_and_unload(), IDS), after) < pair.noise


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_weights_trained_since_the_swap_survive_unpatching(name: str) -> None:
    pair = Pair(name, "rope", "attention")
    model = pair.native()
    table = {key: value.clone() for key, value in model.state_dict().items() if "wpe" in key or "embed_pos" in key}
    patch_model(model, "rope", site="attention")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    gradients(model, pair)
    optimizer.step()
    trained = {key: value.clone() for key, value in model.state_dict().items()}
    unpatch_model(model)
    now = model.state_dict()
    assert all(torch.equal(now[key], value) for key, value in table.items())
    kept = [key for key in now if key not in table]
    assert all(torch.equal(now[key], trained[key]) for key in kept)
    assert not all(torch.equal(now[key], pair.native().state_dict()[key]) for key in kept)
