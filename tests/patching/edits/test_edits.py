"""Every kind of edit says how it is made, undone, checked and loaded again; plans of them are values."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import pkgutil
from typing import Any

import pytest
import torch
from transformers import CLIPVisionModel, ViTModel

import hf_posswap.patching.sites
from hf_posswap import Blend, Rope, SwapPlan, patch_model, plan_swap, set_blend, swap_plan, unpatch_model
from hf_posswap.patching.edits.edit import EDITS, Edit
from hf_posswap.testing.tiny import tiny_model
from tests.stock import RELEASE

INTERFACE = ("apply", "undo", "check", "reload", "touches")
SWAPS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "learned table longer": ("gpt2", "learned", {"max_length": 64}),
    "sinusoidal table": ("gpt2", "sinusoidal", {"max_length": 64}),
    "rope for a table": ("gpt2", "rope", {"max_length": 64}),
    "two at work together": ("gpt2", {"name": "together", "table": "learned", "inside": "rope"}, {}),
    "added to the rotation": ("llama", "native + alibi", {}),
    "blend": ("gpt2", "blend", {"new": "alibi", "weight": 0.5}),
    "blend of tables": ("gpt2", "blend", {"new": "sinusoidal", "weight": 0.5}),
    "native rope": ("llama", "yarn", {"factor": 2.0}),
    "native nope": ("llama", "nope", {}),
    "identity rotation": ("llama", "alibi", {}),
    "layers that do not rotate": ("smollm3", "yarn", {"factor": 2.0}),
    "attention with a class of its own": ("gpt_neo", "rope", {"max_length": 64}),
    "longer causal masks": ("gpt_neo", "learned", {"max_length": 64}),
    "longer masks of an older class": ("gpt_bigcode", "sinusoidal", {"max_length": 64}),
    "a table that its class does not save": ("MarianMTModel", "sinusoidal", {"max_length": 64}),
    "computed table": ("xglm", "rope", {}),
    "plain buffer": ("ctrl", "nope", {}),
    "native ALiBi": ("bloom", "rope", {}),
    "native T5 bias": ("t5", "t5", {}),
    "rows that stay zero": ("t5", {"decoder": "nope"}, {}),
    "two stacks": ("bart", "rope", {}),
    "relative positions dropped": ("deberta", "rope", {"relative": "drop"}),
    "patches": (ViTModel, "sinusoidal_2d", {"image_size": 48}),
    "row ids": (CLIPVisionModel, "learned_2d", {"image_size": 64}),
    "coordinates": (ViTModel, "rope_2d", {}),
    "angles of the model": ("gptj", "rope", {}),
}


def kinds() -> dict[str, type[Edit]]:
    """Return every kind of edit that the package defines."""
    for module in pkgutil.walk_packages(hf_posswap.patching.__path__, "hf_posswap.patching."):
        importlib.import_module(module.name)
    return {name: kind for name, kind in EDITS.items() if kind.__module__.startswith("hf_posswap.")}


def planned(swap: str, *, meta: bool = True) -> tuple[Any, SwapPlan]:
    name, scheme, options = SWAPS[swap]
    changes = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]} if name == "deberta" else {}
    model = tiny_model(name, meta=meta, **changes)
    return model, plan_swap(model, scheme, **options)


@pytest.mark.parametrize("name", sorted(name for name in kinds() if not name.startswith("_")))
def test_an_edit_has_all_of_the_interface(name: str) -> None:
    kind = kinds()[name]
    assert not inspect.isabstract(kind)
    for member in INTERFACE:
        assert getattr(kind, member) is not getattr(Edit, member), member


@pytest.mark.parametrize("member", INTERFACE)
def test_an_edit_that_lacks_a_part_of_it_cannot_be_made(member: str) -> None:
    body = {name: (lambda self, *_: None) for name in INTERFACE if name != member}
    kind = type("Lacking", (Edit,), body)
    try:
        with pytest.raises(TypeError, match=f"abstract method '?{member}"):
            kind(site="config", path="x", before="a", after="b")
    finally:
        EDITS.pop("Lacking")


def test_the_swaps_here_have_every_kind_of_edit() -> None:
    seen = {type(edit).__name__ for swap in SWAPS for edit in planned(swap)[1].edits}
    of_later_releases = {"StopRotation"} if RELEASE < (5, 24) else set()
    assert seen | of_later_releases == {name for name in kinds() if not name.startswith("_")}


@pytest.mark.parametrize("swap", SWAPS)
def test_a_plan_is_a_value(swap: str) -> None:
    model, plan = planned(swap)
    name, scheme, options = SWAPS[swap]
    assert plan_swap(model, scheme, **options) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301
    assert SwapPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("swap", SWAPS)
def test_what_is_planned_is_what_is_done_and_undone(swap: str) -> None:
    model, plan = planned(swap, meta=False)
    name, scheme, options = SWAPS[swap]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert swap_plan(patch_model(model, scheme, **options)) == plan
    assert [edit.path for edit in plan.edits if edit.check(model)] == []
    unpatch_model(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_blend_that_moves_on_leaves_the_plan_of_its_beginning_alone() -> None:
    model = tiny_model("gpt2", meta=False)
    plan = swap_plan(patch_model(model, Blend(new=Rope(), weight=0.25)))
    text, same = str(plan), pickle.dumps(plan)
    set_blend(model, 0.75)
    assert (str(plan), pickle.dumps(plan)) == (text, same)
    assert model._posswap.plan.scheme.weight == 0.75
    assert [edit.path for edit in model._posswap.plan.edits if edit.check(model)] == []
