"""Layers that do not rotate, in models whose others do: a scheme inside attention acts where a rotation was, only."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_posswap import (
    Alibi,
    NoPE,
    RNoPE,
    Rope,
    Scheme,
    explain,
    load,
    patch_model,
    plan_swap,
    swap_plan,
    unpatch_model,
    verify_swap,
)
from hf_posswap.errors import UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families import locate
from hf_posswap.families.rotary import ROTATES, TURNING_REFUSED
from hf_posswap.patching.sites.attention.function import has_interface
from hf_posswap.testing.tiny import language_models, tiny_model
from tests.stock import cache_in, with_cache

LENGTH = 24
IDS = torch.randint(5, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0))
KNOWN = {kind for types in language_models().values() for kind in types}
STILL = sorted(kind for kind in ROTATES if kind in KNOWN or kind == "llama4_text")
UNTURNED = sorted(kind for kind in TURNING_REFUSED if kind in KNOWN)
SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
"""Of four heads: the geometric sequence of the paper, https://arxiv.org/abs/2108.12409."""


def logits(model: Any, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False, **given).logits


def tiny(kind: str, **changes: Any) -> Any:
    """Return a tiny model whose layers 0, 1 and 2 rotate and whose layer 3 does not, where its code has such."""
    if kind in ("flint", "lara_mini"):
        changes = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]} | changes
    return tiny_model(kind, meta=False, attn_implementation="eager", **changes)


def turned_by(attention: nn.Module, config: Any) -> bool:
    """Return whether an attention module gives something else when cos and sin do."""
    hidden = torch.randn(1, 5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(1, 1, 5, 5)
    with torch.no_grad():
        given = [attention(hidden, position_embeddings=turn(config, 5), attention_mask=mask)[0] for turn in (at, far)]
    return not torch.equal(*given)


def told_to_turn(model: Any, attention: nn.Module) -> bool:
    """Return whether the model gives an attention module anything to turn by."""
    told = list[bool]()
    names = list(inspect.signature(type(attention).forward).parameters)[1:]

    def listen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        told.append((dict(zip(names, args, strict=False)) | kwargs).get("position_embeddings") is not None)

    handle = attention.register_forward_pre_hook(listen, with_kwargs=True)
    logits(model)
    handle.remove()
    return all(told)


def at(config: Any, length: int, step: float = 1.0) -> Any:
    """Return cos and sin of arbitrary angles of heads of 16, or complex numbers where the model's code wants those."""
    angles = torch.outer(torch.arange(length) * step, torch.linspace(1.0, 0.1, 8))[None]
    if config.model_type == "llama4_text":
        return torch.polar(torch.ones_like(angles), angles)
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def far(config: Any, length: int) -> Any:
    return at(config, length, step=3.0)


def test_there_are_such_models() -> None:
    assert {"cohere2", "smollm3", "llama4_text", "exaone4", "afmoe"} <= set(STILL)
    assert {"deepseek_v3", "nanochat"} <= set(UNTURNED)


@pytest.mark.parametrize("kind", STILL)
def test_which_layers_rotate_is_what_their_own_forward_does(kind: str) -> None:
    model = tiny(kind)
    stack, config = locate(model).main, model.config
    attention = [model.get_submodule(path) for path in stack.attention]
    turned = [told_to_turn(model, module) and turned_by(module, config) for module in attention]
    assert turned == [layer not in stack.nope_layers for layer in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("kind", STILL)
def test_a_bias_comes_in_the_place_of_each_rotation_and_nowhere_else(kind: str) -> None:
    """Against the stock model: its rotation made neutral, ALiBi added by hand to the masks of layers 0, 1 and 2."""
    model, by_hand = tiny(kind), tiny(kind)
    if not has_interface(model.model.layers[0].self_attn):  # AFMoE's, in older releases
        with pytest.raises(UnsupportedSwapError, match="does not attend through .* What works: what its config expr"):
            patch_model(model, "alibi")
        return
    plan = swap_plan(patch_model(model, "alibi"))
    assert [edit.path for edit in plan.edits if edit.path.endswith("self_attn")] == [
        f"model.layers.{layer}.self_attn" for layer in range(3)
    ]
    assert "Layers without rotation stay as they are: 3." in plan.notes
    verify_swap(model)
    add_alibi(by_hand, range(3))
    torch.testing.assert_close(logits(model), logits(by_hand), atol=1e-4, rtol=0)
    unpatch_model(model)
    assert torch.equal(logits(model), logits(tiny(kind)))


@pytest.mark.parametrize("kind", UNTURNED)
def test_a_bias_in_attention_that_nothing_may_turn(kind: str) -> None:
    model, by_hand = tiny(kind), tiny(kind)
    patch_model(model, "alibi")
    add_alibi(by_hand, range(4))
    torch.testing.assert_close(logits(model), logits(by_hand), atol=1e-4, rtol=0)


def add_alibi(model: Any, layers: range) -> None:
    """Make the rotary modules of a stock `model` neutral and add ALiBi to the masks of these attention layers."""
    for path in locate(model).main.rotary:
        model.get_submodule(path).register_forward_hook(neutral)
    for layer in layers:
        attention = model.model.layers[layer].self_attn
        names = list(inspect.signature(type(attention).forward).parameters)[1:]
        hook = functools.partial(biased, names)
        attention.register_forward_pre_hook(hook, with_kwargs=True)


def neutral(module: nn.Module, args: Any, out: Any) -> Any:
    return (torch.ones_like(out[0]), torch.zeros_like(out[1])) if isinstance(out, tuple) else torch.ones_like(out)


def biased(names: list[str], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    places = torch.arange(LENGTH)
    distance = (places[:, None] - places[None]).abs()
    return (), given | {"attention_mask": given["attention_mask"] - SLOPES[:, None, None] * distance}


@pytest.mark.parametrize("kind", ["cohere2", "smollm3", "llama4_text"])
def test_nope_and_a_fading_rotation_leave_the_others_alone(kind: str) -> None:
    model, by_hand = tiny(kind), tiny(kind)
    plan = swap_plan(patch_model(model, "nope"))
    assert plan.route == "native"
    assert "Layers without rotation stay as they are: 3." in plan.notes
    add_alibi(by_hand, range(0))
    nothing = logits(by_hand)
    torch.testing.assert_close(logits(model), nothing, atol=1e-4, rtol=0)
    unpatch_model(model)
    before = logits(model)
    patch_model(model, "blend", new=NoPE(), weight=0.0)
    torch.testing.assert_close(logits(model), before, atol=1e-4, rtol=0)
    unpatch_model(model)
    patch_model(model, "blend", new=NoPE(), weight=1.0)
    torch.testing.assert_close(logits(model), nothing, atol=1e-4, rtol=0)


def test_steps_with_a_cache_equal_a_full_forward() -> None:
    """Past the window, and past the chunk of Llama 4."""
    for kind in ("cohere2", "smollm3", "llama4_text"):
        model = tiny(kind)
        patch_model(model, "alibi")
        cache, parts = None, []
        for start in range(0, LENGTH, 5):
            with torch.no_grad():
                out = model(input_ids=IDS[:, start : start + 5], **with_cache(model, cache), use_cache=True)
            cache = cache_in(out)
            parts.append(out.logits)
        gap = float((torch.cat(parts, 1) - logits(model)).abs().max())
        assert gap < 1e-4, kind


def test_a_layer_that_does_not_rotate_is_not_named() -> None:
    model = tiny_model("smollm3")
    with pytest.raises(
        UnsupportedSwapError,
        match=r"per_layer names layer 3, which does not rotate in SmolLM3ForCausalLM: .* What works: layers 0, 1, 2\.",
    ):
        plan_swap(model, Rope().per_layer({3: Alibi()}))
    with pytest.raises(UnsupportedSwapError, match=r"only the layers that rotate \(0, 1, 2\) take another rotation"):
        plan_swap(model, Rope().per_layer({3: NoPE()}))
    plan = plan_swap(model, Rope().per_layer({1: Alibi(), 3: NoPE()}))
    assert [edit.path for edit in plan.edits if edit.path.endswith("attn")] == [
        f"model.layers.{layer}.self_attn" for layer in range(3)
    ]


def test_a_layer_that_keeps_its_own_rotation_is_not_named() -> None:
    model = tiny_model("gemma3_text", meta=False)  # layers 1 and 3 see all tokens
    before = logits(model)
    message = r"names layer 0, which keeps its own rotation in Gemma3ForCausalLM: .* What works: layers 1, 3, and a def"
    for scheme in (Rope().per_layer({0: Alibi(), 1: Alibi()}), RNoPE(layers=(0, 1))):
        with pytest.raises(UnsupportedSwapError, match=message):
            patch_model(model, scheme)
    assert torch.equal(logits(model), before)
    patch_model(model, Alibi().per_layer({0: NoPE()}))  # where no layer rotates, all take theirs
    assert torch.equal(logits(unpatch_model(model)), before)


@pytest.mark.parametrize("kind", ["smollm3", "gemma3_text"])
@pytest.mark.parametrize(
    "scheme",
    [
        Rope().per_layer({1: Rope(base=500.0)}),
        Rope().per_layer({1: "dynamic:factor=2"}),
        RNoPE(every=2, rotary=Rope(base=500.0)),
    ],
    ids=str,
)
def test_layers_of_their_own_load_again(kind: str, scheme: Scheme, tmp_path: Path) -> None:
    model = patch_model(tiny_model(kind, meta=False), scheme)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path).eval()), expected)
    half = load(tmp_path, dtype=torch.bfloat16)  # transformers builds it with this dtype as the default
    assert swap_plan(half).scheme == swap_plan(model).scheme


def test_a_window_that_no_rotating_layer_sees_past_is_refused() -> None:
    with pytest.raises(UnsupportedSwapError, match="sees only the last 8 keys in every layer that rotates"):
        plan_swap(tiny_model("cohere2"), "rerope", window=8)
    plan_swap(tiny_model("cohere2"), "rerope", window=4)


def test_a_model_whose_layers_all_rotate_has_no_such_note() -> None:
    model = tiny_model("smollm3", no_rope_layers=[1] * 4)
    assert locate(model).main.nope_layers == ()
    assert not any("without rotation" in note for note in plan_swap(model, "alibi").notes)


def test_a_model_none_of_whose_layers_rotates_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="SmolLM3ForCausalLM: none of its layers rotates"):
        plan_swap(tiny_model("smollm3", no_rope_layers=[0] * 4), "alibi")


@pytest.mark.parametrize("scheme", ["xpos", "rerope", "dual_chunk"])
def test_what_turns_is_refused_where_nothing_may_turn(scheme: str) -> None:
    report = explain(tiny_model("deepseek_v3"), scheme)
    assert report.refusal is not None
    assert f"{scheme} would turn queries and keys inside attention" in report.refusal
    assert "its latent attention rotates a separate part of each head" in report.refusal
