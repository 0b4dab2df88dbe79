"""p-RoPE against transformers' "proportional" and MHA2MLA's sets, CoPE against its formula and stock "longrope"."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posswap import patch_model, swap_plan, verify_swap
from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import default_inv_freq
from hf_posswap.schemes import Cope, PRope, make_scheme
from tests.schemes.small import llama
from tests.stock import cache_in, with_cache

Geometries = Callable[..., Geometry]
WIDTHS = st.integers(2, 80).map(lambda half: 2 * half)
SHARES = st.sampled_from([0.25, 0.5, 0.58, 0.75, 1.0]) | st.floats(0.01, 1.0)


@given(dim=WIDTHS, p=SHARES, base=st.sampled_from([10000.0, 500000.0]))
def test_it_is_transformers_proportional(geometry: Geometries, dim: int, p: float, base: float) -> None:
    shape = geometry(head_dim=dim)
    if math.floor(p * dim / 2) == 0:
        with pytest.raises(SchemeError, match=f"of this model's {dim // 2} rotary pairs is none; give a larger p"):
            PRope(p=p).resolve(shape, None)
        return
    scheme = PRope(p=p, base=base).resolve(shape, None)
    config = llama(head_dim=dim, rope_parameters=scheme.native_rope(shape))
    ours, (theirs, factor) = scheme.angles(shape), ROPE_INIT_FUNCTIONS["proportional"](config)
    assert torch.equal(ours.inv_freq > 0, theirs > 0)
    torch.testing.assert_close(ours.inv_freq, theirs, rtol=2e-7, atol=0)  # pow rounds by the length of its vector
    assert ours.attention_factor == factor == 1.0


@pytest.mark.parametrize("pairs", [8, 25, 50, 64, 100])
@pytest.mark.parametrize("percent", [7, 25, 29, 57, 58, 75, 100])
def test_as_many_pairs_turn_as_exact_arithmetic_says(geometry: Geometries, pairs: int, percent: int) -> None:
    shape = geometry(head_dim=2 * pairs)
    kept = math.floor(Fraction(percent, 100) * pairs)
    if kept:
        scheme = PRope(p=percent / 100).resolve(shape, None)
        assert [len(chosen) for chosen in scheme.turning(shape)] == [kept]
        assert int((scheme.angles(shape).inv_freq > 0).sum()) == kept


@given(dim=WIDTHS, p=SHARES, select=st.sampled_from(["first", "last", "uniform"]))
def test_the_pairs_that_turn_are_those_of_mha2mla(geometry: Geometries, dim: int, p: float, select: str) -> None:
    shape, pairs = geometry(head_dim=dim), dim // 2
    kept = math.floor(p * pairs + 1e-9)
    if not kept:
        return
    sets = {
        "first": {k for k in range(pairs) if k < kept},
        "last": {k for k in range(pairs) if pairs - kept <= k},
        "uniform": {math.floor(Fraction(k * dim, 2 * kept)) for k in range(kept)},
    }
    inv_freq = PRope(p=p, select=select).resolve(shape, None).angles(shape).inv_freq
    plain = default_inv_freq(10000.0, dim)
    assert {pair for pair in range(pairs) if inv_freq[pair]} == sets[select]
    assert all(inv_freq[pair] == plain[pair] for pair in sets[select])


@pytest.mark.parametrize("select", ["first", "last", "uniform"])
def test_a_whole_share_is_plain_rope(geometry: Geometries, select: str) -> None:
    shape = geometry(head_dim=24)
    scheme = PRope(p=1, select=select).resolve(shape, None)
    assert torch.equal(scheme.angles(shape).inv_freq, default_inv_freq(10000.0, 24))


def test_it_keeps_the_width_that_partial_narrows(geometry: Geometries) -> None:
    shape = geometry(head_dim=64)
    scheme = PRope(p=0.5, partial=0.5).resolve(shape, None)
    inv_freq = scheme.angles(shape).inv_freq
    assert torch.equal(inv_freq[:8], default_inv_freq(10000.0, 32)[:8])
    assert inv_freq[8:].tolist() == [0.0] * 8


def test_a_narrower_rotation_is_not_taken_for_a_share_of_pairs() -> None:
    shape = Geometry(32, 4, 4, 32, 2, 64, True, 32, "half", 10000.0)
    with pytest.raises(SchemeError, match=r"partial=0.5 narrows the rotation .* Give p=0.5 in its place"):
        PRope(partial=0.5).resolve(shape, None)
    narrow = PRope(p=0.5, partial=0.5).resolve(shape, None)
    assert (narrow.p, narrow.partial) == (0.5, 0.5)
    assert PRope(p=0.5).resolve(shape, None).resolve(shape, None).p == 0.5  # a resolved scheme names both


def test_only_the_paper_s_selection_is_native() -> None:
    for select, route in (("first", "native"), ("last", "plugin"), ("uniform", "plugin")):
        model = LlamaForCausalLM(llama())
        assert swap_plan(patch_model(model, "p_rope", p=0.5, select=select)).route == route


def test_a_swapped_llama_is_a_llama_with_that_config() -> None:
    model = LlamaForCausalLM(llama()).eval()
    rope = {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    stock = LlamaForCausalLM(llama(rope_parameters=rope)).eval()
    stock.load_state_dict(model.state_dict())
    patch_model(model, "p_rope", p=0.5)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)


@given(data=st.data(), pairs=st.integers(1, 40))
def test_a_list_turns_those_pairs_and_no_others(geometry: Geometries, data: Any, pairs: int) -> None:
    chosen = data.draw(st.lists(st.integers(0, pairs - 1), min_size=1, unique=True))
    shape = geometry(head_dim=2 * pairs)
    scheme = PRope(select=chosen).resolve(shape, None)
    assert scheme.select == tuple(sorted(chosen))
    expected = [10000.0 ** (-i / pairs) * (i in chosen) for i in range(pairs)]
    assert scheme.angles(shape).inv_freq.tolist() == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_each_key_head_turns_its_own_pairs_and_its_query_heads_with_it(geometry: Geometries, layout: Any) -> None:
    shape = geometry(head_dim=16, num_heads=6, num_kv_heads=3, layout=layout)
    lists = [[0, 1, 5], [], [7]]
    mechanism = PRope(select=lists).resolve(shape, None).mechanism(shape)
    query, key = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 5, 16)
    positions = torch.stack((torch.arange(5), torch.arange(5) + 90))
    prepared = mechanism.prepare(positions, torch.full((2, 1, 1, 1), 100))
    q, k = mechanism.rotate_query(query, prepared), mechanism.rotate_key(key, prepared)
    for group, chosen in enumerate(lists):
        if not chosen:
            assert torch.equal(k[:, group], key[:, group])
            assert torch.equal(q[:, 2 * group : 2 * group + 2], query[:, 2 * group : 2 * group + 2])
            continue
        one = geometry(head_dim=16, num_heads=2, num_kv_heads=1, layout=layout)
        alone = PRope(select=chosen).resolve(one, None).mechanism(one)
        prepared_alone = alone.prepare(positions, torch.full((2, 1, 1, 1), 100))
        heads = slice(2 * group, 2 * group + 2)
        torch.testing.assert_close(q[:, heads], alone.rotate_query(query[:, heads], prepared_alone))
        torch.testing.assert_close(k[:, [group]], alone.rotate_key(key[:, [group]], prepared_alone))


def test_the_same_list_for_each_head_is_one_list_in_a_running_model() -> None:
    ids = torch.arange(40)[None]
    config = llama(num_attention_heads=4, num_key_value_heads=2)
    models = [LlamaForCausalLM(config).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    lists: list[Any] = [[0, 2, 5], [[0, 2, 5], [5, 0, 2]]]
    for model, select in zip(models, lists, strict=True):
        assert swap_plan(patch_model(model, "p_rope", select=select)).route == "plugin"
        verify_swap(model)
    with torch.no_grad():
        one, other = (model(input_ids=ids).logits for model in models)
        cached = models[1](input_ids=ids[:, :30], use_cache=True)
        steps = models[1](input_ids=ids[:, 30:], **with_cache(models[1], cache_in(cached))).logits
    torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    torch.testing.assert_close(steps, other[:, 30:], rtol=0, atol=1e-5)


def test_a_list_of_the_first_pairs_is_native_and_equals_the_share() -> None:
    models = [LlamaForCausalLM(llama()).eval() for _ in range(3)]
    ids = torch.arange(40)[None]
    for model, options in zip(models, ({"p": 0.5}, {"select": [0, 1, 2, 3]}, {"select": range(8)}), strict=True):
        model.load_state_dict(models[0].state_dict())
        assert swap_plan(patch_model(model, "p_rope", **options)).route == "native"
    with torch.no_grad():
        share, named, all_of_them = (model(input_ids=ids).logits for model in models)
    assert torch.equal(share, named)
    plain = LlamaForCausalLM(llama()).eval()
    plain.load_state_dict(models[0].state_dict())
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, all_of_them)


@pytest.mark.parametrize("select", ["last", (1, 4), ((0, 1), (4,))])
def test_a_record_keeps_it(geometry: Geometries, select: Any) -> None:
    scheme = PRope(select=select).resolve(geometry(num_kv_heads=2), None)
    assert make_scheme(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert scheme.resolve(geometry(num_kv_heads=2), None) == scheme


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"select": []}, "select is empty, so that no pair would turn; use 'nope'"),
        ({"select": [[], []]}, "select is empty, so that no pair would turn"),
        ({"select": [1, 1]}, r"select names a pair twice: \[1, 1\]"),
        ({"select": [-1]}, "a pair in select must be a whole number from 0 to 1048576, got -1"),
        ({"select": [True]}, "a pair in select must be a whole number"),
        (
            {"select": [0.5]},
            "select must be one of 'first', 'last', 'uniform', a list of pairs, or one such list",
        ),
        ({"select": [0, [1]]}, "select must be one of 'first', 'last'"),
        ({"select": 3}, "select must be one of 'first', 'last'"),
        ({"select": None}, "select must be one of 'first', 'last'"),
        ({"select": "middle"}, "select must be one of 'first', 'last', 'uniform', got 'middle'"),
        ({"select": [0], "p": 0.5}, "a list in select already sets how many pairs turn, got p=0.5 as well; give one"),
    ],
)
def test_impossible_lists_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemeError, match=f"p_rope: {says}"):
        PRope(**options)


def test_lists_that_do_not_fit_the_model_are_refused(geometry: Geometries) -> None:
    with pytest.raises(SchemeError, match="select names pair 8, and this model has 8 rotary pairs, counted from 0"):
        PRope(select=[0, 8]).resolve(geometry(), None)
    with pytest.raises(SchemeError, match="select has 3 lists, and this model has 4 key heads; give one list a key"):
        PRope(select=[[0], [1], [2]]).resolve(geometry(), None)


@given(dim=WIDTHS, base=st.sampled_from([10000.0, 500000.0, 1e7]), data=st.data())
def test_cope_fades_the_slowest_pairs_out_and_stock_computes_the_same(
    geometry: Geometries, dim: int, base: float, data: Any
) -> None:
    pairs = dim // 2
    faded = data.draw(st.integers(2, pairs))
    shape = geometry(head_dim=dim)
    scheme = Cope(base=base, faded=faded).resolve(shape, None)
    ours = scheme.angles(shape)
    expected = [base ** (-2 * i / dim) for i in range(pairs)]
    for k in range(faded):  # cos^2 of half the angle: the weight written otherwise
        expected[pairs - faded + k] *= math.cos(math.pi * k / (faded - 1) / 2) ** 2
    assert ours.inv_freq.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-19)
    config = llama(
        head_dim=dim, max_position_embeddings=shape.original_length, rope_parameters=scheme.native_rope(shape)
    )
    for length in (None, 10 * shape.original_length):
        theirs, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
        assert theirs.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-19)
        assert factor == 1.0


def test_cope_fades_the_paper_s_share_of_the_model_s_own_angles(geometry: Geometries) -> None:
    shape = geometry(head_dim=128)
    assert Cope().resolve(shape, None).faded == 20
    own = tuple(0.9**i for i in range(8))
    scaled = geometry(head_dim=16, rotary_dim=16, base=10000.0, frequencies=own, attention_factor=1.25)
    angles = Cope().resolve(scaled, None).angles(scaled)
    assert angles.inv_freq.tolist() == pytest.approx([*own[:7], 0.0])  # of two pairs the first keeps its angle
    assert angles.attention_factor == 1.25
    still = geometry(head_dim=16, rotary_dim=16, base=10000.0, frequencies=(*own[:4], 0.0, 0.0, 0.0, 0.0))
    fading = Cope().resolve(still, None)  # as in Gemma 4: pairs that do not turn cannot fade
    assert fading.angles(still).inv_freq.tolist() == pytest.approx([*own[:3], 0.0, 0.0, 0.0, 0.0, 0.0])
    assert fading.native_rope(still) is None


@pytest.mark.parametrize(
    ("faded", "says"), [(1, "faded must be a whole number from 2"), (9, "8 rotary pairs of this model")]
)
def test_cope_refuses_what_it_cannot_fade(geometry: Geometries, faded: int, says: str) -> None:
    with pytest.raises(SchemeError, match=says):
        Cope(faded=faded).resolve(geometry(head_dim=16), None)
