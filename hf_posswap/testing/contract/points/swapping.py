"""What a swap is: the mechanism changes, nothing else does, and all of it comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_posswap import patch_model, patched, swap_plan, unpatch_model, verify_swap
from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.testing.contract.checks import CHANGE, NOISE, check, check_differs, check_same, gap, raises
from hf_posswap.testing.contract.models import LENGTH, WAYS, copied
from hf_posswap.testing.contract.pairs import LONGER, Pair, words
from hf_posswap.testing.contract.point import once, point

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IDS = words(2, LENGTH - 2)


def state_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a copy of all tensors of a model, by name."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check_same_state(model: PreTrainedModel, before: dict[str, torch.Tensor]) -> None:
    """Raise unless the tensors of a model are those of `before`.

    Raises:
        BrokenPromiseError: they are not.
    """
    now = model.state_dict()
    check(list(now) == list(before), "the same tensors by name", sorted(set(now) ^ set(before)) or "another order")
    changed = [name for name in before if not torch.equal(now[name], before[name])]
    check(not changed, "the same values in each tensor", f"others in {changed}")


def tables_of(pair: Pair) -> set[str]:
    """Return the names of the weights of the position tables."""
    return {f"{stack.table_path}.weight" for stack in pair.plan.sites.stacks if stack.table_path is not None}


@point(refused=True)
def a_refusal_says_why_and_what_would_work(refused: Pair) -> None:
    """A refusal says why and what works instead, and leaves the model as it was."""
    model = refused.native()
    before, config = state_of(model), model.config.to_dict()
    with raises(UnsupportedSwapError, match="What works:"):
        refused.patch(model)
    check_same_state(model, before)
    check(model.config.to_dict() == config, "the same config", model.config.to_dict())


@point()
def the_swap_changes_the_logits_where_it_must(pair: Pair) -> None:
    """The swap changes the logits, unless it is what the model has."""
    model = pair.native()
    before = pair.logits(model, IDS)
    pair.patch(model)
    after = pair.logits(model, IDS)
    if pair.identity:
        check_same(after, before, NOISE)
    elif pair.may_act_late and gap(after, before) <= CHANGE:  # nothing within the window: then beyond it
        ids = words(2, min(2 * LONGER, pair.plan.max_length))
        check_differs(pair.logits(model, ids), pair.logits(pair.native(), ids), meaning="other logits past the window")
    else:
        check_differs(after, before)


@point(lambda pair: bool(pair.stack) and len(pair.plan.schemes) > 1)
def a_swap_of_one_stack_is_neither_none_nor_that_of_both(pair: Pair) -> None:
    """A swap of one stack is neither no swap nor that of both."""
    model = pair.native()
    before, whole = pair.logits(model, IDS), pair.logits(pair.specimen(), IDS)
    plan = swap_plan(
        patch_model(model, {pair.stack: pair.plan.schemes[pair.stack]}, max_length=pair.plan.max_length, site=pair.site)
    )
    check(list(plan.schemes) == [pair.stack], f"a swap of the {pair.stack} alone", list(plan.schemes))
    actual = pair.logits(model, IDS)
    for other in (before, whole):
        if pair.identity:
            check_same(actual, other, NOISE)
        else:
            check_differs(actual, other)
    verify_swap(model)
    unpatch_model(model)
    check_same(pair.logits(model, IDS), before)


@point(once)
def verify_swap_agrees(pair: Pair) -> None:
    """verify_swap finds the swap in force."""
    verify_swap(pair.swapped())


@point(once)
def only_this_instance_changes(pair: Pair) -> None:
    """Only the patched model changes: no other one, and no class."""
    other, model = pair.native(), pair.native()
    before = pair.logits(other, IDS)
    members = dict(vars(type(model)))
    modules = {type(module): dict(vars(type(module))) for module in model.modules()}
    pair.patch(model)
    check_same(pair.logits(other, IDS), before)
    check_same(pair.logits(pair.native(), IDS), before)
    check(dict(vars(type(other))) == members, "the model's class as it was", "other members")
    changed = [cls.__name__ for cls, unchanged in modules.items() if dict(vars(cls)) != unchanged]
    check(not changed, "the modules' classes as they were", changed)
    apart = type(other.config) is not type(model.config) or pair.plan.route == "native"
    check(apart, "a config class of its own", type(model.config).__name__)


@point(once)
def unpatching_is_bit_exact(pair: Pair) -> None:
    """Unpatching restores the model bit for bit."""
    model = pair.native()
    before, config, expected = state_of(model), model.config.to_dict(), pair.logits(model, IDS)
    config_class = type(model.config)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    shapes = [(name, type(module), pre_hooks(module)) for name, module in model.named_modules()]
    with patched(model, pair.plan.scheme, max_length=pair.plan.max_length, site=pair.site):
        pair.logits(model, IDS)
        check(hasattr(model.config, "posswap"), "a record of the swap in the config", "none")
    check_same_state(model, before)
    check(model.config.to_dict() == config, "the same config", model.config.to_dict())
    check(type(model.config) is config_class, f"a {config_class.__name__}", type(model.config).__name__)
    now = [(name, type(module), pre_hooks(module)) for name, module in model.named_modules()]
    check(now == shapes, "the same modules and hooks", [entry for entry in now if entry not in shapes])
    now_frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    check(now_frozen == frozen, f"{sorted(frozen)} frozen", sorted(now_frozen))
    check_same(pair.logits(model, IDS), expected)


@point(once)
def state_dict_keys_are_kept_or_announced(pair: Pair) -> None:
    """The state dict keeps its keys, and the plan announces those that are added."""
    model, native = pair.swapped(), pair.native()
    before, after = native.state_dict(), model.state_dict()
    announced = {name for name in pair.plan.added if "(" not in name}
    added = set(after) - set(before)
    check(added == announced, f"the keys that the plan announces, {sorted(announced)}", sorted(added))
    check(set(before) <= set(after), "every key of the unswapped model", f"without {sorted(set(before) - set(after))}")
    resized = {name for name in before if before[name].shape != after[name].shape}
    tables = tables_of(pair)
    emptied = {name for name in resized if name in pair.plan.unused}  # what attention made its own positions from
    check(resized <= tables | emptied, "the same shapes outside position tables", sorted(resized - tables - emptied))
    for name in set(before) - tables - emptied:
        check(torch.equal(before[name], after[name]), f"{name} as it was", "other values")


@point(once)
def parameters_are_counted_as_announced(pair: Pair) -> None:
    """The plan counts the parameters that are added and those out of use."""

    def sizes(model: PreTrainedModel) -> dict[str, int]:
        return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}

    before, after = sizes(pair.native()), sizes(pair.swapped())
    trained = getattr(pair.plan.scheme, "trainable", True)
    frozen = 0 if trained else sum(before.get(table, 0) for table in tables_of(pair))  # Marian's are from the start
    grown = sum(after.values()) - sum(before.values())
    strange = set(pair.plan.unused) - set(pair.native().state_dict())
    check(not strange, "parameters of the model as those out of use", sorted(strange))
    unused = sum(count for name, count in pair.plan.unused.items() if name in before)  # RoFormer's sinusoids are frozen
    announced = sum(pair.plan.added.values()) - unused - frozen
    check(grown == announced, f"{announced} trainable parameters more", grown)


@point(once, parameter="way", values=WAYS, few=True)
def copies_are_whole_and_independent(pair: Pair, way: str) -> None:
    """A copy of a swapped model is whole, and independent of it."""
    model = pair.swapped()
    expected, native = pair.logits(model, IDS), pair.logits(pair.native(), IDS)
    twin = copied(model, way)
    check_same(pair.logits(twin, IDS), expected)
    check(twin.config.posswap == model.config.posswap, "the same record in the config", twin.config.posswap)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    check_same(
        pair.logits(model, IDS), expected, meaning="the original's logits, which shares no weights with the copy,"
    )
    twin = copied(model, way)
    unpatch_model(twin)
    check_same(pair.logits(twin, IDS), native, meaning="the unswapped model's logits from the unpatched copy")
    check_same(pair.logits(model, IDS), expected, meaning="the original's logits, whose copy alone was unpatched,")
    verify_swap(model)
    unpatch_model(model)
    check_same(pair.logits(model, IDS), native)
