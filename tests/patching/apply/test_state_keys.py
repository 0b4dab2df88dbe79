"""A plan names every key of the state dict that a swap adds, resizes or puts out of use, in every family."""

from __future__ import annotations

from typing import Any

import pytest

from hf_posswap import patch_model, swap_plan, unpatch_model
from hf_posswap.errors import PosswapError
from hf_posswap.families import FAMILIES
from hf_posswap.families.locating import REFUSED, family_of, locate
from hf_posswap.patching.inspect.describe import stand_ins
from hf_posswap.schemes import schemes_for
from hf_posswap.testing.tiny import language_models, tiny_model
from tests.stock import UNBUILT

COMPUTED = ["XGLMForCausalLM", "CTRLLMHeadModel", "M2M100ForConditionalGeneration"]
"""Classes whose tables no checkpoint holds."""


def kinds() -> list[str]:
    """Return one scheme of each kind, and those of several kinds, or with parameters of their own."""
    first: dict[str, str] = {}
    for name, cls in schemes_for("text").items():
        first.setdefault(cls.kind, name)
    return sorted({*first.values(), "alibi", "blend", "fire", "learned", "rope", "sinusoidal", "t5", "together"})


def sizes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the state dict."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check(model: Any, scheme: str, site: Any) -> bool:
    """Swap `model`, on meta, compare its keys with the plan's, and take it back; return whether it could be swapped."""
    before = sizes(model)
    try:
        plan = swap_plan(patch_model(model, scheme, site=site, **stand_ins(scheme, locate(model).geometry)))
    except PosswapError:
        return False
    after = sizes(model)
    grown = {name.removesuffix(" (new rows)") for name in plan.added if name.endswith(" (new rows)")}
    added = {name for name in plan.added if "(" not in name}
    said = (type(model).__name__, scheme, site)
    assert set(after) - set(before) == added, said
    assert set(before) - set(after) <= set(plan.unused), said
    resized = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    assert resized <= grown | set(plan.unused), said
    assert set(plan.unused) <= set(before), said
    unpatch_model(model)
    assert sizes(model) == before, said
    return True


@pytest.mark.parametrize("name", COMPUTED)
def test_no_key_stands_for_a_table_that_no_checkpoint_holds(name: str) -> None:
    model = tiny_model(name)
    before = set(sizes(model))
    plan = swap_plan(patch_model(model, "rope"))
    assert set(sizes(model)) - before == set(plan.added) == set()
    unpatch_model(model)
    patch_model(model, "fire")
    assert set(sizes(model)) - before == set(patch_names(model)) != set()


def patch_names(model: Any) -> dict[str, int]:
    """Return what the plan of a swapped model adds."""
    return model._posswap.plan.added


@pytest.mark.slow
def test_every_key_that_comes_or_goes_is_in_the_plan() -> None:
    swapped: dict[str, set[str]] = {}
    for name in sorted(language_models()):
        if name in UNBUILT or REFUSED.keys() & set(language_models()[name]):
            continue
        model = tiny_model(name)
        family = family_of(model.config).name
        if swapped.get(family):
            continue
        ways = [(scheme, site) for scheme in kinds() for site in ("auto", "attention")]
        swapped[family] = {scheme for scheme, site in ways if check(model, scheme, site)}
    for_text = {name for name, family in FAMILIES.items() if all(part.image is None for part in family.parts)}
    assert for_text - set(swapped) <= {"hrm_text"}
    assert {family for family, done in swapped.items() if not done} == set()
