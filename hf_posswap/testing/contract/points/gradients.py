"""Training a swapped model: gradients, a step, checkpointing, LoRA before and after."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap import unpatch_model, verify_swap
from hf_posswap.testing.contract.checks import (
    CHANGE,
    NOISE,
    SkippedPointError,
    check,
    check_differs,
    check_finite,
    check_same,
    raises,
)
from hf_posswap.testing.contract.models import LENGTH, MODELS
from hf_posswap.testing.contract.pairs import Pair, words
from hf_posswap.testing.contract.point import once, point
from hf_posswap.testing.contract.points.swapping import tables_of

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PreTrainedModel

IDS = words(2, LENGTH - 2)
PEFT_ASKS = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def gradients(model: PreTrainedModel, pair: Pair, **kwargs: object) -> dict[str, torch.Tensor]:
    """Return the gradient of every trained parameter after one loss."""
    model.train()
    model.zero_grad()
    given = pair.given(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
    model(**given, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@point(once)
def gradients_reach_all_that_the_plan_keeps(pair: Pair) -> None:
    """A training step gives a finite gradient to every parameter that the plan keeps or adds."""
    reached = gradients(pair.swapped(), pair)
    expected = {name for name, grad in gradients(pair.native(), pair).items() if grad.any()}
    expected = (expected | set(pair.plan.added)) - set(pair.plan.unused)
    expected = {name for name in expected if "(" not in name}  # rows of a table that is there already
    if not getattr(pair.plan.scheme, "trainable", True):
        tables = tables_of(pair)
        expected -= tables
        check(not tables & set(reached), "no gradient of a frozen table", sorted(tables & set(reached)))
    without = sorted(expected - {name for name, grad in reached.items() if grad.any()})
    check(not without, "a gradient for each parameter in use", f"none for {', '.join(without)}")
    for name, grad in reached.items():
        check_finite(grad, f"a finite gradient of {name}")


@point(once, parameter="reentrant", values=(False, True), few=True)
def gradient_checkpointing_gives_the_same_gradients(pair: Pair, reentrant: bool) -> None:
    """Gradient checkpointing gives the same gradients."""
    model = pair.swapped()
    expected = gradients(model, pair, use_cache=False) if pair.causal else gradients(model, pair)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    if not model.supports_gradient_checkpointing:  # the native class, and the swapped one with it
        with raises(ValueError, match="does not support"):
            enable({"use_reentrant": reentrant})
        return
    enable({"use_reentrant": reentrant})
    actual = gradients(model, pair, use_cache=False) if pair.causal else gradients(model, pair)
    check(set(actual) == set(expected), "gradients of the same parameters", sorted(set(actual) ^ set(expected)))
    for name, grad in expected.items():
        check_same(actual[name], grad, 1e-5 * (1 + float(grad.abs().max())), f"the gradient of {name}")
    check_same(pair.logits(model.eval(), IDS), pair.logits(pair.specimen(), IDS))


def with_lora(model: PreTrainedModel, name: str) -> Any:
    """Return a PEFT model around `model`; the same adapter every time."""
    peft = _peft()
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(MODELS[name].projections),
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
    )
    return peft.get_peft_model(model, config).eval()


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise SkippedPointError("peft is not installed") from error
    return peft


@point(once, few=True, ignored=(PEFT_ASKS,))
def lora_before_and_after_the_swap_is_the_same(pair: Pair) -> None:
    """An adapter of LoRA gives the same before and after the swap, merged and unpatched too."""
    native = with_lora(pair.native(), pair.model)
    untouched = pair.logits(native, IDS)
    before = with_lora(pair.native(), pair.model)
    pair.patch(before)
    after = with_lora(pair.swapped(), pair.model)
    expected = pair.logits(before, IDS)
    check_same(pair.logits(after, IDS), expected)
    check_differs(expected, pair.logits(pair.specimen(), IDS), CHANGE, "logits that the adapter changes")
    merged = copy.deepcopy(after).merge_and_unload()
    check_same(pair.logits(merged, IDS), expected, pair.noise, "merged, the same logits")
    check_same(pair.logits(before.merge_and_unload(), IDS), expected, pair.noise, "merged, the same logits")
    with after.disable_adapter():
        bound = NOISE if pair.limits.rounded else 0.0
        off = pair.logits(after, IDS)
        check_same(off, pair.logits(pair.specimen(), IDS), bound, "without the adapter, the swapped model's logits")
    unpatch_model(after)
    check_same(pair.logits(after, IDS), untouched, meaning="unpatched, the logits of the adapter on the stock model")


@point(once, lambda pair: pair.learns, ignored=(PEFT_ASKS,))
def peft_trains_and_saves_what_a_scheme_learns(pair: Pair, tmp_path: Path) -> None:
    """PEFT trains and saves what a scheme learns."""
    peft = _peft()
    config = peft.LoraConfig(
        target_modules=list(pair.tiny.projections),
        modules_to_save=["posswap"],
        fan_in_fan_out=pair.model == "gpt2",
    )
    model = peft.get_peft_model(pair.swapped(), config)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and "posswap" in n}
    check(len(trained) == len(pair.plan.added), f"{len(pair.plan.added)} trained parameters", sorted(trained))
    reached = gradients(model, pair)
    without = [name for name in trained if not reached[name].any()]
    check(not without, "a gradient for each parameter of the scheme", f"none for {without}")
    torch.optim.SGD(trained.values(), lr=0.5).step()
    after = pair.logits(model.eval(), IDS)
    check_differs(after, pair.logits(pair.specimen(), IDS), NOISE, "other logits after a step")
    verify_swap(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(pair.swapped(), tmp_path).eval()
    check_same(pair.logits(again, IDS), after, meaning="loaded again, the same logits")
    with model.disable_adapter():
        check_same(pair.logits(model, IDS), pair.logits(pair.specimen(), IDS))
    check_same(pair.logits(model.merge_and_unload(), IDS), after, pair.noise, "merged, the same logits")
