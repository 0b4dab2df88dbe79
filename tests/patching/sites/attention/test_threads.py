"""Forwards of one model at once, of several threads or one inside another: each goes by its own position ids."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_posswap import patch_model, swap_plan
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemos
from hf_posswap.testing.tiny import tiny_model
from tests.contract.pairs import CHANGE, NOISE, gap
from tests.families.single import words

IDS = words(2, 8)
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
"""Stock classes that skip padding count it, and the position ids of generate, behind it."""
SPREAD = torch.tensor([[0, 1, 2, 5, 6, 9, 10, 11]])
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BloomForCausalLM": ({"position_ids": SPREAD}, {}),
    "OPTForCausalLM": ({"attention_mask": PADDED}, {"attention_mask": PADDED.flip(0)}),
    "RobertaForMaskedLM": ({"attention_mask": PADDED}, {}),
    "T5ForConditionalGeneration": (
        {"decoder_input_ids": IDS, "decoder_position_ids": SPREAD},
        {"decoder_input_ids": IDS, "decoder_position_ids": 3 * SPREAD},
    ),
}
"""What two threads call a model with, beside the ids."""


def swapped(name: str) -> Any:
    model = tiny_model(getattr(transformers, name), meta=False)
    patch_model(model, "rope", site="attention")
    return model


def given(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call: what a mask hides is the padding that its ids say."""
    ids, mask = IDS, call.get("attention_mask")
    if mask is not None:
        ids = ids.masked_fill(mask == 0, model.config.pad_token_id)
    return {"input_ids": ids, **call}


def first(model: Any, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**given(model, call))[0]


def between(module: nn.Module, act: Any) -> Any:
    """Let another thread do `act` once, whenever this thread is about to call `module`; return how to end that."""
    caller, raised = threading.current_thread(), []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    def hook(*_: Any) -> None:
        if threading.current_thread() is caller:
            other = threading.Thread(target=run)
            other.start()
            other.join()
            assert not raised, raised

    return module.register_forward_pre_hook(hook, prepend=True)


@pytest.mark.parametrize("place", ["entry", "attention"])
@pytest.mark.parametrize("name", CALLS)
def test_a_forward_of_another_thread_meanwhile_changes_nothing(name: str, place: str) -> None:
    model, (mine, theirs) = swapped(name), CALLS[name]
    stack = swap_plan(model).sites.main
    module = model.get_submodule(stack.entry if place == "entry" else stack.attention[-1])
    expected, other, found = first(model, mine), first(model, theirs), []
    assert gap(expected, other) > CHANGE
    handle = between(module, lambda: found.append(first(model, theirs)))
    try:
        assert gap(first(model, mine), expected) < NOISE
    finally:
        handle.remove()
    assert found
    assert all(gap(one, other) < NOISE for one in found)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_forward_inside_a_forward_changes_nothing(name: str, fails: bool) -> None:
    model, (mine, theirs) = swapped(name), CALLS[name]
    stack, depth, found = swap_plan(model).sites.main, [0], []
    expected, other = first(model, mine), first(model, theirs)

    def run(*_: Any) -> None:
        if depth[0] and fails:
            raise ValueError("not today")
        if depth[0]:
            return
        depth[0] += 1
        with pytest.raises(ValueError, match="not today") if fails else contextlib.nullcontext():
            found.append(first(model, theirs))
        depth[0] -= 1

    handle = model.get_submodule(stack.attention[-1]).register_forward_pre_hook(run, prepend=True)
    try:
        assert gap(first(model, mine), expected) < NOISE
    finally:
        handle.remove()
    assert bool(found) != fails
    assert all(gap(one, other) < NOISE for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["stack", "attention"])
def test_what_is_compiled_by_itself_is_told_by_what_is_not(part: str) -> None:
    torch._dynamo.reset()
    model, call = swapped("BloomForCausalLM"), CALLS["BloomForCausalLM"][0]
    expected, stack = first(model, call), swap_plan(model).sites.main
    for path in [stack.entry] if part == "stack" else stack.attention:
        model.get_submodule(path).compile(backend="eager")
    assert gap(first(model, call), expected) < NOISE
    assert gap(first(model, {}), first(swapped("BloomForCausalLM"), {})) < NOISE
    assert gap(first(model, call), expected) < NOISE


@pytest.mark.slow
def test_what_is_not_compiled_is_told_by_what_is() -> None:
    torch._dynamo.reset()
    model, call = swapped("BloomForCausalLM"), CALLS["BloomForCausalLM"][0]
    expected = first(model, call)
    for path in swap_plan(model).sites.main.attention:
        module = model.get_submodule(path)
        module.forward = torch.compiler.disable(module.forward)
    model.compile(backend="eager")
    assert gap(first(model, call), expected) < NOISE


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda memos: pickle.loads(pickle.dumps(memos))])
def test_copies_tell_threads_apart_too(copied: Any) -> None:
    memos = copied(ForwardMemos(source="mask", padding_id=7))
    found: list[Any] = []
    memos.begin(nn.Identity(), SPREAD, by_caller=True, runs_again=False)
    other = threading.Thread(target=lambda: found.append(memos.now(nn.Identity())))
    other.start()
    other.join()
    assert (found[0].given, found[0].source, found[0].padding_id) == (None, "mask", 7)
    assert memos.now(nn.Identity()).given is SPREAD
    memos.end(nn.Identity())
    assert memos.now(nn.Identity()).given is None
