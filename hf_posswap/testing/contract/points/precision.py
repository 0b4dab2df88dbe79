"""Half precision: angles and slopes stay in float32, wherever the cast happens, and padding is finite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posswap.compat.transformers_calls import cache_in
from hf_posswap.families.rope_config import inv_freq_names
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.testing.contract.checks import check, check_finite, check_same, gap, raises
from hf_posswap.testing.contract.models import LENGTH
from hf_posswap.testing.contract.pairs import Pair, with_cache, words
from hf_posswap.testing.contract.point import once, point

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IDS = words(2, LENGTH - 2)


def constants(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that holds angles or slopes: of native rotary modules and of mechanisms."""
    for path, module in model.named_modules():
        for name in inv_freq_names(module):
            yield f"{path}.{name}", getattr(module, name)
        if isinstance(module, Mechanism):
            for name, value in vars(module).items():
                for number, tensor in enumerate(value if isinstance(value, tuple) else [value]):
                    if isinstance(tensor, Tensor) and tensor.is_floating_point():
                        yield f"{path}.{name}[{number}]", tensor


def cast(pair: Pair, when: str) -> PreTrainedModel:
    """Return a model swapped in bfloat16, or one cast to it `when` it is swapped already."""
    if when == "before":
        model = pair.native().to(torch.bfloat16)
        pair.patch(model)
        return model
    return pair.swapped().to(torch.bfloat16)


def rounded(pair: Pair) -> PreTrainedModel:
    """Return the float32 model with weights that bfloat16 can hold: what differs from it is arithmetic alone."""
    model = pair.native().to(torch.bfloat16)
    for (_, here), (_, there) in zip(model.named_buffers(), pair.native().named_buffers(), strict=True):
        here.data = there.data  # its own cast has blurred the native angles
    model.float()
    pair.patch(model)
    return model


@point(once, parameter="when", values=("before", "after"))
def bfloat16_keeps_angles_in_float32(pair: Pair, when: str) -> None:
    """Angles, slopes and other constants stay in float32 in a bfloat16 model."""
    model = cast(pair, when)
    pair.logits(model, IDS)
    exact = dict(constants(pair.swapped()))  # a specimen may hold the angles of a longer run
    for name, tensor in constants(model):
        if ".native." in name:  # the native angles: out of use, or of layers that keep their own rotation
            continue
        kept = tensor.dtype == exact[name].dtype and tensor.dtype in (torch.float32, torch.float64)
        check(kept, f"{name} in float32 or float64, as before the cast", tensor.dtype)
        check(torch.equal(tensor, exact[name]), f"{name} as in float32", f"{gap(tensor, exact[name]):.3g} apart")


@point(once, parameter="when", values=("before", "after"), few_values=("before",))
def bfloat16_is_close_to_float32(pair: Pair, when: str) -> None:
    """The logits in bfloat16 are as close to those in float32 as the stock class's."""
    actual, exact = pair.logits(cast(pair, when), IDS), pair.logits(rounded(pair), IDS)
    check(actual.dtype == torch.bfloat16, "logits in bfloat16", actual.dtype)
    reference = pair.native().to(torch.bfloat16)
    usual = gap(pair.logits(reference, IDS), pair.logits(reference.float(), IDS))
    check_same(actual, exact, 3 * usual + 0.05, "the logits in float32")


@point(once, parameter="half", values=("bfloat16", "float16"), few=True)
def mixed_precision_is_close_to_float32(pair: Pair, half: str) -> None:
    """Logits, gradients and cached steps under autocast are as close to float32 as the stock class's.

    Logits, gradients and a step upon a cache, of a padded batch too, as far off as the stock class's at most.
    """
    if pair.limits.mixed_precision_error:
        _check_unable(pair, half)
        return
    (actual, slopes), (exact, exact_slopes) = (mixed(pair, pair.swapped(), name) for name in (half, "float32"))
    (usual, stock_slopes), (expected, expected_slopes) = (
        mixed(pair, pair.native(), name) for name in (half, "float32")
    )
    if changes := pair.limits.steady:
        slopes, exact_slopes = (mixed(pair, pair.swapped(**changes), name)[1] for name in (half, "float32"))
        stock_slopes, expected_slopes = (mixed(pair, pair.native(**changes), name)[1] for name in (half, "float32"))
    lost = {name for name, slope in stock_slopes.items() if not torch.isfinite(slope).all()}
    allowed = not lost or (half == "float16" and (pair.limits.overflows or not pair.limits.known))
    check(allowed, "finite gradients of the stock class", f"none of {sorted(lost)}")
    actual["gradients"], exact["gradients"] = joined(slopes, lost), joined(exact_slopes, lost)
    usual["gradients"], expected["gradients"] = joined(stock_slopes, lost), joined(expected_slopes, lost)
    check(actual.keys() == usual.keys(), f"{sorted(usual)}, as of the stock class", sorted(actual))
    for key, values in actual.items():
        check(values.dtype == usual[key].dtype, f"{key} in {usual[key].dtype}, as of the stock class", values.dtype)
        check_finite(values, f"finite numbers: {key}")
        bound = 3 * apart(usual[key], expected[key]) + 0.02
        off = apart(values, exact[key])
        check(off < bound, f"{key} within {bound:.2g} of float32, of its size", f"{off:.3g} apart")


def _check_unable(pair: Pair, half: str) -> None:
    """Check that a swap raises as its stock class does, or is right where it attends in place of what raised."""
    with raises(RuntimeError, match=pair.limits.mixed_precision_error):
        mixed(pair, pair.native(), half)
    if pair.model == "dbrx" or not pair.plan.scheme.acts_inside:
        with raises(RuntimeError, match=pair.limits.mixed_precision_error):
            mixed(pair, pair.swapped(), half)
        return
    (actual, slopes), (exact, exact_slopes) = (mixed(pair, pair.swapped(), name) for name in (half, "float32"))
    actual["gradients"], exact["gradients"] = joined(slopes, set()), joined(exact_slopes, set())
    for key, values in actual.items():
        check_finite(values, f"finite numbers: {key}")
        off = apart(values, exact[key])
        check(off < 0.05, f"{key} within 0.05 of float32, of its size", f"{off:.3g} apart")


def mixed(pair: Pair, model: PreTrainedModel, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what `model` gives under autocast to the dtype called `name`, and its gradients by the weights' names."""
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    actual = {}
    # a block for each: until torch 2.6 weights that were cast without a gradient had none in the rest of it
    narrow = partial(torch.autocast, "cpu", getattr(torch, name), enabled=name != "float32")
    with narrow():
        actual["padded"] = pair.logits(model, IDS, attention_mask=mask)[mask.bool()]
    if pair.cached:
        with narrow(), torch.no_grad():
            cache = cache_in(model(**pair.given(input_ids=IDS[:, :-1]), use_cache=True))
            actual["step"] = model(**pair.given(input_ids=IDS[:, -1:]), **with_cache(model, cache)).logits
    with narrow():
        out = model(**pair.given(input_ids=IDS, labels=IDS), **({"use_cache": False} if pair.cached else {}))
    actual["logits"] = out.logits.detach()
    out.loss.backward()
    return actual, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def joined(gradients: dict[str, Tensor], lost: set[str]) -> Tensor:
    """Return `gradients` as one vector, without those called `lost`."""
    return torch.cat([gradient.flatten() for name, gradient in sorted(gradients.items()) if name not in lost])


def apart(a: Tensor, b: Tensor) -> float:
    """Return the size of the difference over that of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@point(of_stock=True)
def float16_does_not_overflow(pair: Pair) -> None:
    """A padded batch is finite in float16."""
    model = pair.swapped().to(torch.float16)
    ids = IDS.clone()
    ids[1, :6] = 1
    mask = (ids != 1).long()
    check_finite(pair.logits(model, ids, attention_mask=mask))


@point(lambda pair: not pair.limits.single, few=True, of_stock=True)
def padding_is_finite_in_float64(pair: Pair) -> None:
    """The real tokens of a padded batch in float64 are as in float32.

    The real tokens of a padded batch are as in float32, also where its padding sees nothing at all.
    """
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, -6:], mask[0, -6:] = 1, 0
    ids[1, :6], mask[1, :6] = 1, 0
    actual = pair.logits(pair.swapped().double(), ids, attention_mask=mask)
    expected = pair.logits(pair.specimen(), ids, attention_mask=mask)
    if pair.stack != "encoder":
        actual, expected = actual[mask.bool()], expected[mask.bool()]
    check_same(actual, expected, pair.noise, "the logits in float32")
