"""Attention classes with the interface compute what the classes of transformers do, in every way of running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posswap import patch_model
from hf_posswap.families.interfaces.base import fitting
from hf_posswap.testing.contract.models import copied
from hf_posswap.testing.tiny import tiny_model
from tests.families.interface_models import CASES, Case, dress, words
from tests.stock import RELEASE, cache_in, with_cache

NOISE = 5e-5
"""What summing in another order makes of logits near 5, the scores of some not scaled."""
IDS = words(2, 12)


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    """Return one kind of model."""
    return CASES[request.param]


def logits(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def same(a: Tensor, b: Tensor, noise: float = NOISE) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=noise)


def implementations(case: Case) -> list[str]:
    """Return under which implementations the new class must compute what the original does under its own."""
    return ["eager"] if case.name == "MptInterface" else ["eager", "sdpa"]  # the mask of MPT is made for eager code


def test_a_whole_sequence_equals_the_original(case: Case) -> None:
    expected = logits(case.build())
    for implementation in implementations(case):
        same(logits(case.dressed(implementation)), expected)


def test_left_and_right_padding(case: Case) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    expected = logits(case.build(), attention_mask=mask)
    for implementation in implementations(case):
        # what stands at padding is nobody's: rows that see nothing differ by how they are masked
        same(logits(case.dressed(implementation), attention_mask=mask)[mask.bool()], expected[mask.bool()])


def test_padding_is_finite_in_double_precision(case: Case) -> None:
    """A row that sees nothing, as padding is, must not become NaN, which the next layer would spread to all rows."""
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    expected = logits(case.build(), attention_mask=mask)  # in double precision some originals are NaN, one raises
    for implementation in implementations(case):
        found = logits(case.dressed(implementation).double(), attention_mask=mask)
        assert torch.isfinite(found).all()
        same(found[mask.bool()].float(), expected[mask.bool()])


def test_a_mask_of_pairs(case: Case) -> None:
    if case.masks_2d:
        pytest.skip("its masks say only which tokens are padding")
    seen = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    seen[:, :, 6:, 1:5] = False
    if not case.caches:
        seen[:, :, :6, 9:] = True  # an encoder
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = logits(case.build(), attention_mask=mask)
    assert (expected - logits(case.build())).abs().max() > 0.05
    same(logits(case.dressed(), attention_mask=mask), expected)


def test_given_positions_and_packed_documents(case: Case) -> None:
    if not case.positions:
        pytest.skip("its forward takes no position ids, or makes nothing of them")
    for positions in (2 * torch.arange(12)[None], torch.tensor([[*range(5), *range(7)]])):
        positions = positions.expand(2, -1)
        expected = logits(case.build(), position_ids=positions)
        assert (expected - logits(case.build())).abs().max() > 1e-3
        for implementation in implementations(case):
            same(logits(case.dressed(implementation), position_ids=positions), expected)


def test_step_by_step_with_a_cache(case: Case) -> None:
    if not case.caches:
        pytest.skip("it has no cache")
    for implementation in implementations(case):
        native, dressed = (stepwise(model) for model in (case.build(), case.dressed(implementation)))
        same(dressed, native)
    same(stepwise(case.dressed()), logits(case.dressed()))


def stepwise(model: Any) -> Tensor:
    """Return the logits of chunks of 5, 3, 1, 1, ... tokens, each after the cache of those before."""
    found, cache, begin = [], None, 0
    for length in (5, 3, 1, 1, 1, 1):
        chunk = IDS[:, begin : begin + length]
        with torch.no_grad():
            out = model(input_ids=chunk, **with_cache(model, cache), use_cache=True)
        found, cache, begin = [*found, out.logits], cache_in(out), begin + length
    return torch.cat(found, dim=1)


def test_gradients_equal_the_originals(case: Case) -> None:
    found = []
    for model in (case.build(), case.dressed()):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    native, dressed = found
    assert native.keys() == dressed.keys()
    assert len(native) > 10
    for name, gradient in native.items():
        same(dressed[name], gradient, 1e-5 + 1e-4 * float(gradient.abs().max()))


def test_weights_are_dropped_while_training_alone(case: Case) -> None:
    model = case.dressed()
    expected = logits(model)
    for module in model.modules():
        for name in ("attn_dropout", "attention_dropout", "dropout", "attn_dropout_p"):
            held = getattr(module, name, None)
            if isinstance(module, case.interface) and held is not None:
                setattr(module, name, torch.nn.Dropout(0.9) if isinstance(held, torch.nn.Module) else 0.9)
    same(logits(model.eval()), expected)
    rotary_falcon = case.name == "FalconInterface" and not model.config.alibi  # of which the original drops nothing
    assert bool((logits(model.train()) - expected).abs().max() > 0.05) is not rotary_falcon


def test_half_precision_is_as_near_as_the_original(case: Case) -> None:
    exact = logits(case.build())
    native, dressed = (logits(model.to(torch.bfloat16)).float() for model in (case.build(), case.dressed()))
    assert (dressed - exact).abs().mean() < 1.25 * (native - exact).abs().mean() + 1e-3


def test_attention_weights_are_handed_out_alike(case: Case) -> None:
    if case.name == "FalconInterface" and case.implementation == "sdpa":
        pytest.skip("the original changes to eager code, with ALiBi twice in it")
    native, dressed = (
        model(input_ids=IDS, output_attentions=True).attentions for model in (case.build(), case.dressed())
    )
    assert len(native) == len(dressed)
    for ours, theirs in zip(dressed, native, strict=True):
        same(ours, theirs)


def test_it_generates_the_same(case: Case) -> None:
    if "ForMaskedLM" in case.kind:
        pytest.skip("it does not generate")
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    ids = IDS.masked_fill(mask == 0, 1)
    found = [
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=1)
        for model in (case.build(), case.dressed())
    ]
    assert torch.equal(*found)


def test_taken_back_it_is_what_it_was(case: Case) -> None:
    model = case.build()
    before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    expected = logits(model)
    for edit, saved in dress(model, case.interface):
        edit.undo(model, saved)
    assert [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()] == before
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_copies_keep_the_class_and_the_logits(case: Case, way: str) -> None:
    model = case.dressed()
    twin = copied(model, way)
    assert any(type(module) is case.interface for module in twin.modules())
    assert torch.equal(logits(twin), logits(model))


@pytest.mark.slow
def test_it_compiles_without_a_break_where_the_original_does(case: Case) -> None:
    torch._dynamo.reset()
    original = case.build()
    try:
        expected = compiled(original)
    except Exception:
        pytest.skip("the original does not compile in one graph")
    same(compiled(case.dressed()), expected)


def compiled(model: Any) -> Tensor:
    run = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        return run(input_ids=IDS, use_cache=False).logits


@pytest.mark.skipif(RELEASE < (5, 24), reason="their stock classes lack the interface")
@pytest.mark.parametrize("kind", ["GPTJForCausalLM", "CodeGenForCausalLM"])
def test_a_stock_class_with_the_interface_stays_what_it_is(kind: str) -> None:
    model = tiny_model(kind, meta=False)
    before = {name: type(module) for name, module in model.named_modules() if name.endswith(".attn")}
    patch_model(model, "alibi")
    assert len(before) == 4
    assert {name: type(model.get_submodule(name)) for name in before} == before


def test_accelerates_hooks_call_the_new_class(case: Case) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = case.build()
    expected = logits(model)
    native = case.interface.__bases__[-1]
    for module in model.modules():
        if type(module) is native:
            hooks.add_hook_to_module(module, hooks.ModelHook())
    done = dress(model, case.interface)
    calls: list[int] = []
    attend = case.interface.attend
    try:
        case.interface.attend = lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs)
        same(logits(model), expected)
    finally:
        del case.interface.attend
    assert calls
    for edit, saved in done:
        edit.undo(model, saved)
    assert torch.equal(logits(model), expected)


def test_only_the_class_that_it_replaces_fits(case: Case) -> None:
    native = case.interface.__bases__[-1]
    module = next(module for module in case.build().modules() if type(module) is native)
    assert fitting(module, case.interface) is case.interface
    module.__class__ = type("Changed", (native,), {})
    assert fitting(module, case.interface) == (
        f"its class is Changed, and only {native.__name__} is known to equal {case.interface.__name__}, so a scheme "
        "cannot be put inside. What works: the same model loaded with attn_implementation='eager'."
    )
