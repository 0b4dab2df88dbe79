"""bfloat16 models: angles and slopes stay in float32, wherever the cast happens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posswap.families.rope_config import inv_freq_names
from hf_posswap.schemes.mechanism import Mechanism
from tests.contract.models import LENGTH
from tests.contract.pairs import Pair, gap, once, words
from tests.stock import cache_in, with_cache

IDS = words(2, LENGTH - 2)
UNABLE = {"dbrx": "must have the same scalar type", "deberta": "cannot be converted to type"}
"""Models whose own code raises in mixed precision, and how: experts are added, scores masked, in the other dtype."""
OVERFLOWING = ("longt5",)
"""Models whose own gradients overflow in float16."""
SINGLE = ("gpt_oss (cos of half a head)", "t5gemma")
"""Models whose own code is not for float64: it has no product of experts, or makes NaN of rows that see nothing."""
STEADY: dict[str, dict[str, Any]] = {
    "opt": {"activation_function": "gelu"},
    "qwen3_5 (sections of a text tower)": {"layer_types": ["full_attention"] * 4},
}
"""Changes of a config without which rounding turns gradients over: ReLU's kink, and linear attention's norms of next to
nothing."""


def constants(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that holds angles or slopes: of native rotary modules and of mechanisms."""
    for path, module in model.named_modules():
        for name in inv_freq_names(module):
            yield f"{path}.{name}", getattr(module, name)
        if isinstance(module, Mechanism):
            for name, value in vars(module).items():
                for number, tensor in enumerate(value if isinstance(value, tuple) else [value]):
                    if isinstance(tensor, Tensor) and tensor.is_floating_point():
                        yield f"{path}.{name}[{number}]", tensor


def cast(pair: Pair, when: str) -> Any:
    if when == "before":
        model = pair.native().to(torch.bfloat16)
        pair.patch(model)
        return model
    return pair.swapped().to(torch.bfloat16)


def rounded(pair: Pair) -> Any:
    """Return the float32 model with weights that bfloat16 can hold: what differs from it is arithmetic alone."""
    model = pair.native().to(torch.bfloat16)
    for (_, here), (_, there) in zip(model.named_buffers(), pair.native().named_buffers(), strict=True):
        here.data = there.data  # its own cast has blurred the native angles
    model.float()
    pair.patch(model)
    return model


@once
@pytest.mark.parametrize("when", ["before", "after"])
def test_bfloat16_keeps_angles_in_float32(pair: Pair, when: str) -> None:
    model = cast(pair, when)
    pair.logits(model, IDS)
    exact = dict(constants(pair.swapped()))  # a specimen may hold the angles of a longer run
    for name, tensor in constants(model):
        if ".native." in name:  # the native angles: out of use, or of layers that keep their own rotation
            continue
        assert tensor.dtype == exact[name].dtype in (torch.float32, torch.float64), name
        assert torch.equal(tensor, exact[name]), name


@once
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.few), "after"])
def test_bfloat16_is_close_to_float32(pair: Pair, when: str) -> None:
    found, exact = pair.logits(cast(pair, when), IDS), pair.logits(rounded(pair), IDS)
    assert found.dtype == torch.bfloat16
    reference = pair.native().to(torch.bfloat16)
    usual = gap(pair.logits(reference, IDS), pair.logits(reference.float(), IDS))
    assert gap(found, exact) < 3 * usual + 0.05


@once
@pytest.mark.few
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_mixed_precision_is_close_to_float32(pair: Pair, half: str) -> None:
    """Logits, gradients and a step upon a cache, of a padded batch too, as far off as the stock class's at most."""
    if pair.model in UNABLE:
        _check_unable(pair, half)
        return
    (found, slopes), (exact, exact_slopes) = (mixed(pair, pair.swapped(), name) for name in (half, "float32"))
    (usual, stock_slopes), (expected, expected_slopes) = (
        mixed(pair, pair.native(), name) for name in (half, "float32")
    )
    if changes := STEADY.get(pair.model):
        slopes, exact_slopes = (mixed(pair, pair.swapped(**changes), name)[1] for name in (half, "float32"))
        stock_slopes, expected_slopes = (mixed(pair, pair.native(**changes), name)[1] for name in (half, "float32"))
    lost = {name for name, slope in stock_slopes.items() if not torch.isfinite(slope).all()}
    assert not lost or (half == "float16" and pair.model in OVERFLOWING)
    found["gradients"], exact["gradients"] = joined(slopes, lost), joined(exact_slopes, lost)
    usual["gradients"], expected["gradients"] = joined(stock_slopes, lost), joined(expected_slopes, lost)
    assert found.keys() == usual.keys()
    for what, values in found.items():
        assert values.dtype == usual[what].dtype, what
        assert torch.isfinite(values).all(), what
        bound = 3 * apart(usual[what], expected[what]) + 0.02
        assert apart(values, exact[what]) < bound, what


def _check_unable(pair: Pair, half: str) -> None:
    """Check that a swap raises as its stock class does, or is right where it attends in place of what raised."""
    with pytest.raises(RuntimeError, match=UNABLE[pair.model]):
        mixed(pair, pair.native(), half)
    if pair.model == "dbrx" or not pair.plan.scheme.acts_inside:
        with pytest.raises(RuntimeError, match=UNABLE[pair.model]):
            mixed(pair, pair.swapped(), half)
        return
    (found, slopes), (exact, exact_slopes) = (mixed(pair, pair.swapped(), name) for name in (half, "float32"))
    found["gradients"], exact["gradients"] = joined(slopes, set()), joined(exact_slopes, set())
    for what, values in found.items():
        assert torch.isfinite(values).all(), what
        assert apart(values, exact[what]) < 0.05, what


def mixed(pair: Pair, model: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what `model` gives under autocast to the dtype called `name`, and its gradients by the weights' names."""
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    found = {}
    # a block for each: until torch 2.6 weights that were cast without a gradient had none in the rest of it
    narrow = partial(torch.autocast, "cpu", getattr(torch, name), enabled=name != "float32")
    with narrow():
        found["padded"] = pair.logits(model, IDS, attention_mask=mask)[mask.bool()]
    if pair.cached:
        with narrow(), torch.no_grad():
            cache = cache_in(model(**pair.given(input_ids=IDS[:, :-1]), use_cache=True))
            found["step"] = model(**pair.given(input_ids=IDS[:, -1:]), **with_cache(model, cache)).logits
    with narrow():
        out = model(**pair.given(input_ids=IDS, labels=IDS), **({"use_cache": False} if pair.cached else {}))
    found["logits"] = out.logits.detach()
    out.loss.backward()
    return found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def joined(gradients: dict[str, Tensor], lost: set[str]) -> Tensor:
    """Return `gradients` as one vector, without those called `lost`."""
    return torch.cat([gradient.flatten() for name, gradient in sorted(gradients.items()) if name not in lost])


def apart(a: Tensor, b: Tensor) -> float:
    """Return the size of the difference over that of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_float16_does_not_overflow(pair: Pair) -> None:
    model = pair.swapped().to(torch.float16)
    ids = IDS.clone()
    ids[1, :6] = 1
    mask = (ids != 1).long()
    assert torch.isfinite(pair.logits(model, ids, attention_mask=mask)).all()


@pytest.mark.few
@pytest.mark.pairs(lambda pair: pair.model not in SINGLE)
def test_padding_is_finite_in_float64(pair: Pair) -> None:
    """The real tokens of a padded batch are as in float32, also where its padding sees nothing at all."""
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, -6:], mask[0, -6:] = 1, 0
    ids[1, :6], mask[1, :6] = 1, 0
    found = pair.logits(pair.swapped().double(), ids, attention_mask=mask)
    expected = pair.logits(pair.specimen(), ids, attention_mask=mask)
    if pair.stack != "encoder":
        found, expected = found[mask.bool()], expected[mask.bool()]
    assert gap(found, expected) < pair.noise
