"""What a swap is: the mechanism changes, nothing else does, and all of it comes back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from hf_posswap import patch_model, patched, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families import FAMILIES, family_of
from tests.contract.models import LENGTH
from tests.contract.others import ALL
from tests.contract.pairs import CHANGE, NOISE, Pair, gap, once, words
from tests.families import vision_models
from tests.toys.registration import registered

IDS = words(2, LENGTH - 2)


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model: Any, before: dict[str, torch.Tensor]) -> None:
    now = model.state_dict()
    assert list(now) == list(before)
    assert [name for name in before if not torch.equal(now[name], before[name])] == []


def test_a_model_stands_for_every_family() -> None:
    """A family that sees images stands among models of its own, which are asked nothing about words."""
    with registered():
        reading = {family_of(tiny.config()).name for tiny in ALL.values()}
        seeing = {family_of(vision_models.config_of(name)).name for name in vision_models.OF_EACH_FAMILY}
        assert reading | seeing == set(FAMILIES)
        assert seeing == {name for name, family in FAMILIES.items() if any(part.image for part in family.parts)}


def test_a_refusal_says_why_and_what_would_work(refused: Pair) -> None:
    model = refused.native()
    before, config = state(model), model.config.to_dict()
    with pytest.raises(UnsupportedSwapError, match="What works:"):
        refused.patch(model)
    assert_same_state(model, before)
    assert model.config.to_dict() == config


def test_the_swap_changes_the_logits_where_it_must(pair: Pair) -> None:
    model = pair.native()
    before = pair.logits(model, IDS)
    pair.patch(model)
    change = gap(pair.logits(model, IDS), before)
    assert change <= NOISE if pair.identity else change > CHANGE


@pytest.mark.pairs(lambda pair: pair.stack and len(pair.plan.schemes) > 1)
def test_a_swap_of_one_stack_is_neither_none_nor_that_of_both(pair: Pair) -> None:
    model = pair.native()
    before, whole = pair.logits(model, IDS), pair.logits(pair.specimen(), IDS)
    plan = swap_plan(
        patch_model(model, {pair.stack: pair.plan.schemes[pair.stack]}, max_length=pair.plan.max_length, site=pair.site)
    )
    assert list(plan.schemes) == [pair.stack]
    found = pair.logits(model, IDS)
    for other in (before, whole):
        assert gap(found, other) <= NOISE if pair.identity else gap(found, other) > CHANGE
    verify_swap(model)
    unpatch_model(model)
    assert gap(pair.logits(model, IDS), before) == 0


@once
def test_verify_swap_agrees(pair: Pair) -> None:
    verify_swap(pair.swapped())


@once
def test_only_this_instance_changes(pair: Pair) -> None:
    other, model = pair.native(), pair.native()
    before = pair.logits(other, IDS)
    members = dict(vars(type(model)))
    modules = {type(module): dict(vars(type(module))) for module in model.modules()}
    pair.patch(model)
    assert gap(pair.logits(other, IDS), before) == 0
    assert gap(pair.logits(pair.native(), IDS), before) == 0
    assert dict(vars(type(other))) == members
    assert {cls: dict(vars(cls)) for cls in modules} == modules
    assert type(other.config) is not type(model.config) or pair.plan.route == "native"


@once
def test_unpatching_is_bit_exact(pair: Pair) -> None:
    model = pair.native()
    before, config, expected = state(model), model.config.to_dict(), pair.logits(model, IDS)
    config_class = type(model.config)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    shapes = [(name, type(module), dict(module._forward_pre_hooks)) for name, module in model.named_modules()]
    with patched(model, pair.plan.scheme, max_length=pair.plan.max_length, site=pair.site):
        pair.logits(model, IDS)
        assert hasattr(model.config, "posswap")
    assert_same_state(model, before)
    assert model.config.to_dict() == config
    assert type(model.config) is config_class
    assert [(name, type(module), dict(module._forward_pre_hooks)) for name, module in model.named_modules()] == shapes
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == frozen
    assert gap(pair.logits(model, IDS), expected) == 0


@once
def test_state_dict_keys_are_kept_or_announced(pair: Pair) -> None:
    model, native = pair.swapped(), pair.native()
    before, after = native.state_dict(), model.state_dict()
    announced = {name for name in pair.plan.added if "(" not in name}
    assert set(after) - set(before) == announced
    assert set(before) <= set(after)
    resized = {name for name in before if before[name].shape != after[name].shape}
    tables = tables_of(pair)
    emptied = {name for name in resized if name in pair.plan.unused}  # what attention made its own positions from
    assert resized <= tables | emptied
    for name in set(before) - tables - emptied:
        assert torch.equal(before[name], after[name]), name


@once
def test_parameters_are_counted_as_announced(pair: Pair) -> None:
    def sizes(model: Any) -> dict[str, int]:
        return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}

    before, after = sizes(pair.native()), sizes(pair.swapped())
    trained = getattr(pair.plan.scheme, "trainable", True)
    frozen = 0 if trained else sum(before.get(table, 0) for table in tables_of(pair))  # Marian's are from the start
    grown = sum(after.values()) - sum(before.values())
    assert set(pair.plan.unused) <= set(pair.native().state_dict())
    unused = sum(count for name, count in pair.plan.unused.items() if name in before)  # RoFormer's sinusoids are frozen
    assert grown == sum(pair.plan.added.values()) - unused - frozen


@pytest.mark.few
@once
@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_copies_are_whole_and_independent(pair: Pair, way: str) -> None:
    model = pair.swapped()
    expected, native = pair.logits(model, IDS), pair.logits(pair.native(), IDS)
    twin = _copy(model, way)
    assert gap(pair.logits(twin, IDS), expected) == 0
    assert twin.config.posswap == model.config.posswap
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert gap(pair.logits(model, IDS), expected) == 0, "the copy shares weights with the original"
    twin = _copy(model, way)
    unpatch_model(twin)
    assert gap(pair.logits(twin, IDS), native) == 0, "the copy does not come back"
    assert gap(pair.logits(model, IDS), expected) == 0, "unpatching the copy changed the original"
    verify_swap(model)
    unpatch_model(model)
    assert gap(pair.logits(model, IDS), native) == 0


def tables_of(pair: Pair) -> set[str]:
    """Return the names of the weights of the position tables."""
    return {f"{stack.table_path}.weight" for stack in pair.plan.sites.stacks if stack.table_path is not None}


def _copy(model: Any, way: str) -> Any:
    if way == "deepcopy":
        return copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
