"""What a swap is: the mechanism changes, nothing else does, and all of it comes back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from hf_posswap import patched, unpatch_model, verify_swap
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families import FAMILIES, family_of
from hf_posswap.schemes import SCHEMES
from tests.contract.models import LENGTH, TINY
from tests.contract.others import ALL, OTHERS
from tests.contract.pairs import CHANGE, NOISE, OF_EACH_SITE, Pair, all_pairs, gap, logits, words
from tests.toys.registration import TOY_MODEL, TOY_SCHEME, registered

IDS = words(2, LENGTH - 2)
ELSEWHERE = (
    *("bart", "bigbird_pegasus", "blenderbot", "longt5", "m2m_100", "marian", "mvp", "t5", "t5gemma", "t5gemma2"),
    *("trocr", "whisper"),
    *("clip", "deit", "siglip", "vit"),
    *("dbrx", "hrm_text", "zamba2"),
)
"""Families with two stacks, or one of two, and those that see images: tests/families proves them. And rotary ones that
route, repeat or alternate their layers: the light contract does."""


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model: Any, before: dict[str, torch.Tensor]) -> None:
    now = model.state_dict()
    assert list(now) == list(before)
    assert [name for name in before if not torch.equal(now[name], before[name])] == []


def test_every_scheme_and_every_model_is_here() -> None:
    pairs = {(pair.model, pair.scheme) for pair in all_pairs()}
    full = {(model, scheme) for model in TINY for scheme in [*SCHEMES, TOY_SCHEME]}
    assert pairs == full | {(model, scheme) for model in OTHERS for scheme in OF_EACH_SITE}
    assert not set(TINY) & set(OTHERS)
    assert TOY_MODEL in TINY
    assert TOY_SCHEME not in SCHEMES


def test_every_family_is_here_or_elsewhere() -> None:
    with registered():
        here = {family_of(tiny.config()).name for tiny in ALL.values()}
        assert here | set(ELSEWHERE) == set(FAMILIES)
        assert not here & set(ELSEWHERE)


def test_a_refusal_says_why_and_what_would_work(refused: Pair) -> None:
    model = refused.native()
    before, config = state(model), model.config.to_dict()
    with pytest.raises(UnsupportedSwapError, match="What works:"):
        refused.patch(model)
    assert_same_state(model, before)
    assert model.config.to_dict() == config


def test_the_swap_changes_the_logits_where_it_must(pair: Pair) -> None:
    model = pair.native()
    before = logits(model, IDS)
    pair.patch(model)
    change = gap(logits(model, IDS), before)
    assert change <= NOISE if pair.identity else change > CHANGE


def test_verify_swap_agrees(pair: Pair) -> None:
    verify_swap(pair.swapped())


def test_only_this_instance_changes(pair: Pair) -> None:
    other, model = pair.native(), pair.native()
    before = logits(other, IDS)
    members = dict(vars(type(model)))
    modules = {type(module): dict(vars(type(module))) for module in model.modules()}
    pair.patch(model)
    assert gap(logits(other, IDS), before) == 0
    assert gap(logits(pair.native(), IDS), before) == 0
    assert dict(vars(type(other))) == members
    assert {cls: dict(vars(cls)) for cls in modules} == modules
    assert type(other.config) is not type(model.config) or pair.plan.route == "native"


def test_unpatching_is_bit_exact(pair: Pair) -> None:
    model = pair.native()
    before, config, expected = state(model), model.config.to_dict(), logits(model, IDS)
    config_class = type(model.config)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    shapes = [(name, type(module), dict(module._forward_pre_hooks)) for name, module in model.named_modules()]
    with patched(model, pair.plan.scheme, max_length=pair.plan.max_length, site=pair.site):
        logits(model, IDS)
        assert hasattr(model.config, "posswap")
    assert_same_state(model, before)
    assert model.config.to_dict() == config
    assert type(model.config) is config_class
    assert [(name, type(module), dict(module._forward_pre_hooks)) for name, module in model.named_modules()] == shapes
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == frozen
    assert gap(logits(model, IDS), expected) == 0


def test_state_dict_keys_are_kept_or_announced(pair: Pair) -> None:
    model, native = pair.swapped(), pair.native()
    before, after = native.state_dict(), model.state_dict()
    announced = {name for name in pair.plan.added if "(" not in name}
    main = pair.plan.sites.main
    if main.table is not None and main.spec.table.computed:  # no checkpoint held it; one lone zero says that it is gone
        announced |= {f"{pair.plan.sites.table}.weight"}
    assert set(after) - set(before) == announced
    assert set(before) <= set(after)
    resized = {name for name in before if before[name].shape != after[name].shape}
    table = f"{pair.plan.sites.table}.weight"
    emptied = {name for name in resized if name in pair.plan.unused}  # what attention made its own positions from
    assert resized <= {table} | emptied
    for name in set(before) - {table} - emptied:
        assert torch.equal(before[name], after[name]), name


def test_parameters_are_counted_as_announced(pair: Pair) -> None:
    def sizes(model: Any) -> dict[str, int]:
        return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}

    before, after = sizes(pair.native()), sizes(pair.swapped())
    frozen = 0 if getattr(pair.plan.scheme, "trainable", True) else before[f"{pair.plan.sites.table}.weight"]
    grown = sum(after.values()) - sum(before.values())
    assert set(pair.plan.unused) <= set(pair.native().state_dict())
    unused = sum(count for name, count in pair.plan.unused.items() if name in before)  # RoFormer's sinusoids are frozen
    assert grown == sum(pair.plan.added.values()) - unused - frozen


@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_copies_are_whole_and_independent(pair: Pair, way: str) -> None:
    model = pair.swapped()
    expected, native = logits(model, IDS), logits(pair.native(), IDS)
    twin = _copy(model, way)
    assert gap(logits(twin, IDS), expected) == 0
    assert twin.config.posswap == model.config.posswap
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert gap(logits(model, IDS), expected) == 0, "the copy shares weights with the original"
    twin = _copy(model, way)
    unpatch_model(twin)
    assert gap(logits(twin, IDS), native) == 0, "the copy does not come back"
    assert gap(logits(model, IDS), expected) == 0, "unpatching the copy changed the original"
    verify_swap(model)
    unpatch_model(model)
    assert gap(logits(model, IDS), native) == 0


def _copy(model: Any, way: str) -> Any:
    if way == "deepcopy":
        return copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
