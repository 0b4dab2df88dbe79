"""Patching is whole or not at all: whatever breaks in the middle, the model is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import hf_posswap
from hf_posswap import patch_model, patched, plan_swap, swap_plan, unpatch_model
from hf_posswap.errors import NotPatchedError, SwapVerificationError
from tests.contract.models import LENGTH, build
from tests.contract.pairs import gap, logits, words
from tests.patching.plan.test_swap_plan import snapshot

IDS = words(2, LENGTH)
SWAPS = [
    ("gpt2", "rope", "auto"),
    ("gpt2", "sinusoidal", "auto"),
    ("bert", "alibi", "auto"),
    ("llama", "yarn", "auto"),
    ("llama", "rope", "attention"),
]


class Broken(Exception):
    pass


@pytest.mark.parametrize("interrupt", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize(("name", "scheme", "site"), SWAPS)
def test_a_failure_anywhere_leaves_the_model_as_it_was(
    name: str, scheme: str, site: Any, interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    before, expected = snapshot(model), logits(model, IDS)
    kinds = {type(edit) for edit in plan_swap(model, scheme, max_length=2 * LENGTH, site=site).edits}
    assert len(kinds) >= 2
    for kind in kinds:
        native = kind.apply

        def after_its_work(self: Any, model: Any, undo: Any, native: Any = native) -> None:
            native(self, model, undo)
            raise interrupt("on purpose")

        with monkeypatch.context() as patching:
            patching.setattr(kind, "apply", after_its_work)
            with pytest.raises(interrupt, match="on purpose"):
                patch_model(model, scheme, max_length=2 * LENGTH, site=site)
        assert snapshot(model) == before, kind.__name__
        assert gap(logits(model, IDS), expected) == 0


def test_an_action_that_changes_another_parameter_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gpt2")
    kind = type(plan_swap(model, "rope").edits[-1])
    native = kind.apply

    def careless(self: Any, model: Any, undo: Any) -> None:
        native(self, model, undo)
        with torch.no_grad():
            model.transformer.h[0].attn.c_attn.weight.mul_(2)

    monkeypatch.setattr(kind, "apply", careless)
    with pytest.raises(SwapVerificationError, match="parameters outside the plan changed: .*attn.c_attn.weight"):
        patch_model(model, "rope")
    assert not hasattr(model, "_posswap")


def test_patched_takes_the_swap_back_after_an_exception() -> None:
    model = build("gpt2")
    before, expected = snapshot(model), logits(model, IDS)
    with pytest.raises(Broken), patched(model, "alibi", max_length=64) as inside:  # noqa: PT012
        assert inside is model
        logits(model, words(1, 64))
        raise Broken
    assert snapshot(model) == before
    assert gap(logits(model, IDS), expected) == 0


def test_patched_does_not_hide_a_refusal() -> None:
    model = build("gpt2")
    before = snapshot(model)
    with pytest.raises(KeyError, match="unknown scheme"), patched(model, "none of these"):
        raise AssertionError("not reached")
    assert snapshot(model) == before


def test_models_that_share_a_config_do_not_share_a_swap() -> None:
    first = build("llama")
    second = type(first)(first.config).eval()
    expected = logits(second, IDS)
    patch_model(first, "alibi", max_length=2 * LENGTH)
    assert second.config.max_position_embeddings == LENGTH
    assert not hasattr(second.config, "posswap")
    assert gap(logits(second, IDS), expected) == 0


@pytest.mark.parametrize(("name", "scheme", "site"), SWAPS)
def test_swapping_back_and_forth_leaves_nothing_behind(name: str, scheme: str, site: Any) -> None:
    model = build(name)
    before = snapshot(model)
    with patched(model, scheme, max_length=2 * LENGTH, site=site):
        once = logits(model, IDS)
    with patched(model, "alibi"):
        pass
    with patched(model, scheme, max_length=2 * LENGTH, site=site):
        assert gap(logits(model, IDS), once) == 0
    assert snapshot(model) == before


def test_settings_made_since_the_swap_stay_when_it_is_undone(tmp_path: Path) -> None:
    model, length = build("gpt2"), build("gpt2").config.max_position_embeddings
    patch_model(model, "rope", max_length=2 * LENGTH).resize_token_embeddings(model.config.vocab_size + 3)
    model.config.pad_token_id, model.config.use_cache = 1, False
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "swapped")  # which names the class in config.architectures
    vocabulary, expected = model.config.vocab_size, logits(unpatch_model(model), IDS)
    assert (model.config.pad_token_id, model.config.use_cache) == (1, False)
    assert (model.config._attn_implementation, model.config.max_position_embeddings) == ("eager", length)
    assert model.config.vocab_size == vocabulary == len(model.transformer.wte.weight)
    model.save_pretrained(tmp_path / "native")
    assert gap(logits(type(model).from_pretrained(tmp_path / "native").eval(), IDS), expected) < 1e-5


@pytest.mark.parametrize(("name", "scheme", "site"), SWAPS)
def test_a_model_cast_while_swapped_comes_back_cast(name: str, scheme: str, site: Any) -> None:
    model, other = build(name), build(name)
    rotary = dict(other.named_buffers())
    patch_model(model, scheme, max_length=2 * LENGTH, site=site)
    unpatch_model(model.to(torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    other.to(torch.bfloat16)
    for path, buffer in model.named_buffers():  # angles that the cast has not reached are the exact ones
        if buffer.dtype == torch.float32:
            owner, _, leaf = path.rpartition(".")
            setattr(other.get_submodule(owner), leaf, rotary[path])
    assert gap(logits(model, IDS), logits(other, IDS)) == 0


@pytest.mark.parametrize(("name", "scheme", "site"), SWAPS)
def test_the_model_is_returned_and_its_plan_asked_for(name: str, scheme: str, site: Any, tmp_path: Path) -> None:
    model = build(name)
    with pytest.raises(NotPatchedError, match="carries no swap: it has no plan"):
        swap_plan(model)
    planned = plan_swap(model, scheme, max_length=2 * LENGTH, site=site)
    assert patch_model(model, scheme, max_length=2 * LENGTH, site=site) is model
    assert swap_plan(model) == planned
    hf_posswap.save(model, tmp_path / "saved")
    assert swap_plan(hf_posswap.load(tmp_path / "saved")) == planned
    assert unpatch_model(model) is model
    with pytest.raises(NotPatchedError):
        swap_plan(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_peft_model_is_returned_as_it_was_given() -> None:
    wrapped = peft.get_peft_model(build("gpt2"), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    assert patch_model(wrapped, "rope") is wrapped
    assert swap_plan(wrapped) == swap_plan(wrapped.get_base_model())
