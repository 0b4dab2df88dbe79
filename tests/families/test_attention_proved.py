"""Every class that the rotary rule lets into attention: RoPE re-applied there equals the native model, bit by bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model, plan_swap, swap_plan, unpatch_model
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families import locate
from hf_posswap.families.rope_config import config_at, parameters_of
from hf_posswap.families.rotary import ATTENTION_PROVED, ATTENTION_REFUSED, ROTATES, TURNING_REFUSED
from hf_posswap.rope_math import Frequencies, cos_sin
from hf_posswap.testing.tiny import language_models, tiny_model
from tests.docs.pages import text_of
from tests.families.test_rotary import KINDS, NEEDS_AUDIO, is_rotary
from tests.stock import RELEASE, cache_in, with_cache

SHARDS = 12
SAME_CLASS = {
    **dict.fromkeys(("internlm3", "iquestcoder"), (5, 23)),
    **dict.fromkeys(("exaone", "sarvam_mla", "sarvam_moe"), (5, 24)),
}
"""Model types that have a class of another one, and the release that brought them."""
CLOSED_BEFORE = ("AfmoeForCausalLM",)
"""Classes that do not pass on what attention is told, in older releases of transformers."""
APART = {
    "FalconForCausalLM": 1e-4,  # its attention is our own class, which sums in another order
    "Llama4ForCausalLM": 1e-4,  # it multiplies complex numbers, and its norm comes after
}
"""How far apart RoPE inside and outside may be, where not 0."""


def run(model: Any, ids: Tensor, **given: Any) -> Any:
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **decoder, **given)


def in_steps(model: Any, ids: Tensor) -> Tensor | None:
    """Return the logits of `ids` [B, Q] in chunks of 6 with a cache; None where the class has no use for one."""
    if model.config.is_encoder_decoder or not locate_causal(model):
        return None
    cache, parts = None, []
    for start in range(0, ids.shape[1], 6):
        out = run(model, ids[:, start : start + 6], **with_cache(model, cache), use_cache=True)
        cache = cache_in(out)
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


def locate_causal(model: Any) -> bool:
    patch = getattr(model, "_posswap", None)
    return (patch.plan.sites if patch else locate(model)).geometry.causal


def with_our_cos_and_sin(model: Any, own: tuple[str, ...]) -> Any:
    """Give the rotary modules of `model`, stock ones with a plain RoPE, cos and sin as the plugin computes them.

    Layers of the types `own` have turned so before, and do inside attention: they keep stock's arithmetic.

    A plain RoPE that is not the model's own is exact inside attention and rounded to float32 outside it; one unit in
    the last place of cos moves some tiny models by 1e-5, which would hide what is looked for here. What the modules
    are given is held against the formula in float64, and the formula against what they had.
    """
    for rotary in model.modules():
        if type(rotary).__name__.endswith("RotaryEmbedding"):
            rotary.forward = functools.partial(our_cos_and_sin, rotary, rotary.forward, own)
    return model


def our_cos_and_sin(
    rotary: Any, stock: Any, own: tuple[str, ...], x: Tensor, position_ids: Tensor, layer_type: str = ""
) -> tuple[Tensor, Tensor]:
    typed = (layer_type,) if layer_type else ()
    if layer_type in own:
        return stock(x, position_ids, *typed)
    rounded = getattr(rotary, "_".join((*typed, "inv_freq")))
    exponents = torch.arange(len(rounded), dtype=torch.float64) / len(rounded)
    inv_freq = parameters_of(rotary.config, layer_type)["rope_theta"] ** -exponents
    torch.testing.assert_close(rounded.double(), inv_freq, rtol=1e-6, atol=0)
    turned = cos_sin(position_ids, Frequencies.of(inv_freq))
    angles = position_ids[..., None] * inv_freq
    found = []
    for half, exact, before in zip(turned, (angles.cos(), angles.sin()), stock(x, position_ids, *typed), strict=True):
        torch.testing.assert_close(half[:, 0], exact.float(), atol=5e-7, rtol=0)
        copies = before.shape[-1] // half.shape[-1]
        found.append(torch.cat([half[:, 0]] * copies, dim=-1))
        torch.testing.assert_close(found[-1], before, atol=1e-5, rtol=0)
    return found[0], found[1]


def gap(kind: str) -> tuple[float, float] | str:
    """Return how far RoPE in a tiny model's attention is from the native one, and may be; or why it is refused."""
    model = tiny_model(kind, meta=False)
    stack = locate(model).main
    ids = torch.randint(5, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    try:
        plan_swap(model, "rope", site="attention")
    except UnsupportedSwapError as error:
        return str(error)
    allowed = APART.get(kind, 0.0)
    config = config_at(model.config, stack.config)
    own = tuple(kind for kind in stack.rope_layer_types if parameters_of(config, kind)["rope_type"] == "default")
    if stack.full_attention_types[0] not in own:
        assert swap_plan(with_our_cos_and_sin(patch_model(model, "rope"), own)).route == "native"
    native = run(model, ids, use_cache=False).logits
    try:
        native_steps = in_steps(model, ids)
    except AttributeError:  # some caches of transformers 5.14 are not what its masks expect
        if RELEASE >= (5, 18):
            raise
        native_steps = None
    if getattr(model, "_posswap", None) is not None:
        unpatch_model(model)
    patch_model(model, "rope", site="attention")
    inside = run(model, ids, use_cache=False).logits
    if native_steps is not None:
        torch.testing.assert_close(in_steps(model, ids), native_steps, atol=1e-4, rtol=0, msg=lambda m: f"{kind}: {m}")
    return float((inside - native).abs().max()), allowed


def judged(kind: str) -> str | None:
    """Return what is wrong with a class or a model type, or None."""
    found = gap(kind)
    if isinstance(found, tuple):
        apart, allowed = found
        return None if apart <= allowed else f"{apart:.3g} apart"
    if kind in CLOSED_BEFORE and "does not attend through transformers' AttentionInterface" in found:
        return None
    known = any(reason in found for reason in (*ATTENTION_REFUSED.values(), *TURNING_REFUSED.values()))
    return None if known else found


@pytest.mark.parametrize("kind", [*KINDS, "gpt_oss", "internlm3"])
def test_rope_inside_attention_equals_native(kind: str) -> None:
    if kind in SAME_CLASS and RELEASE < SAME_CLASS[kind]:
        pytest.skip(f"transformers has {kind} since {SAME_CLASS[kind]}")
    assert judged(kind) is None


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_rope_inside_attention_equals_native_in_every_class(shard: int) -> None:
    kinds = [name for name in sorted(language_models())[shard::SHARDS] if is_rotary(name) and name not in NEEDS_AUDIO]
    known = {kind for types in language_models().values() for kind in types}
    kinds += [kind for kind in list(SAME_CLASS)[shard : shard + 1] if kind in known]
    assert len(kinds) >= 5
    wrong = {kind: problem for kind in kinds if (problem := judged(kind)) is not None}
    assert wrong == {}


def test_a_model_type_is_proved_or_refused() -> None:
    assert not ATTENTION_PROVED & ATTENTION_REFUSED.keys()
    assert not TURNING_REFUSED.keys() & (ATTENTION_PROVED | ATTENTION_REFUSED.keys())
    assert ROTATES.keys() <= ATTENTION_PROVED


@pytest.mark.parametrize("model_type", ["deepseek_v32", "gemma3n_text", "hrm_text", "minimax"])
def test_what_is_not_proved_is_refused_with_its_reason(model_type: str) -> None:
    with pytest.raises(UnsupportedSwapError, match=f"'{model_type}' that is refused: {ATTENTION_REFUSED[model_type]}"):
        patch_model(tiny_model(model_type), "alibi")


class NextConfig(LlamaConfig):
    """Of a model type that nobody has looked at."""

    model_type = "llama_of_next_year"


class NextForCausalLM(LlamaForCausalLM):
    """Of a model type that nobody has looked at."""

    config_class = NextConfig


def test_a_model_type_that_nobody_has_looked_at_works_natively_and_says_what_is_missing_inside() -> None:
    model = tiny_model(NextForCausalLM)
    assert model.config.model_type == "llama_of_next_year"
    assert plan_swap(model, "yarn", factor=2.0).route == "native"
    with pytest.raises(UnsupportedSwapError, match="'llama_of_next_year' that is refused: it is not proved") as caught:
        plan_swap(model, "alibi")
    assert "missing in ATTENTION_PROVED (page Extending, 'A new model type')" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert "## A new model type" in text_of(".docs/pages/extending.md")


def test_a_bias_comes_in_the_place_of_every_rotation() -> None:
    """A rotation is for the layers that see all tokens; a bias replaces the others' rotation too."""
    model = tiny_model("gemma3_text", meta=False)
    rotary = swap_plan(patch_model(model, "rope", site="attention"))
    carried = [edit.path for edit in rotary.edits if edit.path.endswith("self_attn")]
    assert carried == ["model.layers.1.self_attn", "model.layers.3.self_attn"]
    unpatch_model(model)
    biased = swap_plan(patch_model(model, "alibi"))
    assert [edit.path for edit in biased.edits if edit.path.endswith("self_attn")] == [
        f"model.layers.{layer}.self_attn" for layer in range(4)
    ]
    ids = torch.randint(5, 90, (1, 12))
    shifted = torch.arange(12)[None] + 7
    given, moved = (
        run(model, ids, use_cache=False).logits,
        run(model, ids, position_ids=shifted, use_cache=False).logits,
    )
    torch.testing.assert_close(given, moved, atol=1e-4, rtol=0)
