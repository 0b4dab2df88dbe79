"""What a scheme promises in its traits, and the swaps that must change nothing, on every model."""

from __future__ import annotations

from typing import Any

import pytest

from hf_posswap import patch_model, swap_plan
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.modules import modeling_module
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.rotary import ATTENTION_REFUSED
from hf_posswap.schemes import SCHEMES
from hf_posswap.testing.contract.points import traits
from tests.contract.models import LENGTH, TINY, build
from tests.contract.pairs import LONGER, NOISE, Pair, gap, logits, refusal, words
from tests.contract.points import as_tests
from tests.toys.registration import TOY_MODEL

IDS = words(2, LENGTH)
TABLES = ["gpt2", "opt", "bert", "bert (is_decoder)", "roberta"]
ROTARY = [name for name in TINY if name not in (*TABLES, TOY_MODEL)]
SCALED = ["linear", "ntk", "ntk_by_parts", "yarn", "llama3", "dynamic"]
NATIVE = [*SCALED, "longrope", "p_rope", "cope", "resonance", "resonance_yarn", "nope"]

globals().update(as_tests(traits))  # a test for each point


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ROTARY)
def test_rope_applied_again_inside_attention_equals_native_exactly(name: str, implementation: str) -> None:
    model = build(name, attn_implementation=implementation)
    assert locate(model).rotary
    before = logits(model, IDS)
    plan = swap_plan(patch_model(model, "rope", site="attention"))
    assert plan.route == "plugin"
    assert gap(logits(model, IDS), before) == 0


@pytest.mark.parametrize("name", ROTARY)
def test_rope_applied_again_natively_equals_native_exactly(name: str) -> None:
    model = build(name)
    before = logits(model, IDS)
    assert swap_plan(patch_model(model, "rope")).route == "native"
    assert gap(logits(model, IDS), before) == 0


@pytest.mark.parametrize("name", TABLES)
def test_a_kept_table_changes_nothing(name: str) -> None:
    model = build(name)
    before = logits(model, IDS)
    patch_model(model, "learned")
    assert gap(logits(model, IDS), before) == 0


@pytest.mark.parametrize("site", ["auto", "attention"])
@pytest.mark.parametrize("scheme", SCALED)
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "gpt_neox", "glm"])
def test_a_factor_of_one_is_plain_rope(name: str, scheme: str, site: Any) -> None:
    plain, scaled = build(name), build(name)
    patch_model(plain, "rope", site=site)
    patch_model(scaled, scheme, site=site, factor=1.0)
    assert gap(logits(scaled, IDS), logits(plain, IDS)) < NOISE


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("scheme", NATIVE)
def test_native_and_attention_site_agree(name: str, scheme: str) -> None:
    """transformers' own rotary module is the oracle of the attention site, for every rope type."""
    outside, inside = Pair(name, scheme), Pair(name, scheme, "attention")
    ids = words(2, LONGER - 3)
    if refusal(inside) is not None or outside.plan.route != "native":
        # p-RoPE in a narrowed rotary: stock gives it the width of the whole head
        assert scheme == "nope" or (scheme == "p_rope" and name in ("gpt_neox", "glm"))
        return
    native = outside.swapped()  # a new one: stock's dynamic angles remember the longest text that a model has read
    assert gap(logits(inside.specimen(), ids), logits(native, ids)) < NOISE


def test_causal_only_is_refused_where_a_token_sees_its_future(refused: Pair) -> None:
    sites, why = locate(refused.native()), str(refusal(refused))
    causal, main = all(stack.geometry.causal for stack in sites.stacks), sites.main
    if "would change nothing" in why:
        assert refused.model == "mistral (sliding_window)"
    elif "would act inside attention" in why:
        types = [config_at(refused.native().config, stack.config).model_type for stack in sites.stacks]
        assert any(f"is refused: {ATTENTION_REFUSED.get(one)}. What works:" in why for one in types)
    elif "does not attend through" in why:
        attention = refused.native().get_submodule(main.attention[0])
        assert not hasattr(modeling_module(attention), "eager_attention_forward")
    elif "alters its own (sinks)" in why:
        assert refused.model == "gpt_oss (cos of half a head)"
    elif SCHEMES.get(refused.scheme)().traits.causal_only:
        assert not causal
        with pytest.raises(UnsupportedSwapError, match="sees both sides"):
            refused.patch(refused.native())
    else:
        assert refused.scheme in ("learned", "sinusoidal", "together")
        assert main.table is None or main.table.computed  # XGLM and CTRL compute their sinusoids
