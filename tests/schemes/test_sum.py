"""Parts at work together: what a model has and more, against stock models with the same bias or scale by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import eager_mask

import hf_posswap
from hf_posswap import patch_model, plan_swap, set_backend, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import OptionError, PosswapError, SchemeError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.patching.inspect.paged import paged_problem
from hf_posswap.patching.record.record import native_config
from hf_posswap.patching.sites.attention.backends import backends_of
from hf_posswap.plotting.positions.numbers import scores_by_distance, shown
from hf_posswap.schemes import (
    Alibi,
    Kerple,
    Learned,
    Mechanism,
    Native,
    PerLayer,
    Rope,
    Scheme,
    SSMax,
    Sum,
    make_scheme,
    native,
)
from hf_posswap.schemes.base import Kind, Traits
from hf_posswap.testing.tiny import tiny_model
from tests.checkpoints import fresh
from tests.checkpoints.test_refusals import check_roads
from tests.contract import light
from tests.contract.models import build
from tests.contract.pairs import words
from tests.stock import with_cache

LENGTH, AT = 24, torch.arange(40)
KEEPING = (
    *("LlamaForCausalLM", "Gemma3ForCausalLM", "GPTJForCausalLM", "GPTNeoXForCausalLM", "PhiForCausalLM"),
    *("CohereForCausalLM", "Qwen2MoeForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "BertForMaskedLM"),
    *("T5ForConditionalGeneration", "BloomForCausalLM", "MptForCausalLM", "BartForConditionalGeneration"),
)
"""Models of every kind of native mechanism: rotations of all layouts, tables, biases inside attention."""


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :12]
    with torch.no_grad():
        return model(ids, **inputs).logits


def heads_of(model: Any) -> int:
    config = model.config
    names = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
    return next(getattr(config, name) for name in names if hasattr(config, name))


def alibi_mask(heads: int, length: int) -> Tensor:
    """Return ALiBi's bias with the causal mask in it, [1, H, Q, K], from the paper's formula."""
    slopes = [2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]
    mask = torch.full((1, heads, length, length), torch.finfo(torch.float32).min)
    for h in range(heads):
        for i in range(length):
            for j in range(i + 1):
                mask[0, h, i, j] = -slopes[h] * (i - j)
    return mask


@pytest.mark.parametrize("name", KEEPING)
def test_adding_a_bias_of_zeros_to_what_a_model_has_changes_nothing(name: str) -> None:
    ids = words(2, LENGTH)
    model = light.built(name).eval()
    before, state = logits(model, ids), {key: value.clone() for key, value in model.state_dict().items()}
    patch_model(model, native() + Alibi(slopes=[0.0] * heads_of(model)))
    assert torch.allclose(logits(model, ids), before, atol=2e-5 * float(before.abs().max()))
    unpatch_model(model)
    assert torch.equal(logits(model, ids), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "has"),
    [("llama", None), ("gpt2", None), ("llama", "yarn:factor=2"), ("gpt2", "rope")],
    ids=lambda value: str(value),
)
def test_a_bias_beside_a_rotation_or_a_table_is_the_bias_in_the_mask_of_the_model_without_it(
    name: str, has: str | None
) -> None:
    ids, without, model = words(2, LENGTH), build(name), build(name)
    if has is not None:
        patch_model(without, has)
    patch_model(model, f"{has or 'native'} + alibi")
    expected = logits(without, ids, attention_mask=alibi_mask(heads_of(model), LENGTH).expand(2, -1, -1, -1))
    got = logits(model, ids)
    assert torch.allclose(got, expected, atol=1e-4), (got - expected).abs().max()
    assert (got - logits(without, ids)).abs().max() > 0.1
    assert verify_swap(model)


def scaled_by_hand(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attend with scores times s_h ln n, n counted off one query at a time."""
    scales, (rows, heads, length, _) = SCALES, query.shape
    groups = heads // key.shape[1]
    scores = torch.empty(rows, heads, length, key.shape[2])
    for head in range(heads):
        for i in range(length):
            n = key.shape[2] - length + i + 1
            products = key[:, head // groups] @ query[:, head, i, :, None]
            scores[:, head, i] = products[..., 0] * scaling * float(scales[head]) * math.log(n)
    assert mask is not None
    weights = (scores + mask[:, :, :, : key.shape[2]]).softmax(dim=-1)
    return (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2), None


SCALES = torch.tensor([0.2, 0.35, 0.5, 0.8])


@pytest.fixture
def by_hand() -> str:
    AttentionInterface.register("scaled_by_hand", scaled_by_hand)
    AttentionMaskInterface.register("scaled_by_hand", eager_mask)
    return "scaled_by_hand"


def with_scales(model: Any, scales: Tensor) -> None:
    terms = [module for module in model.modules() if type(module).__name__ == "SSMaxMechanism"]
    assert terms
    for part in terms:
        part.s.data.copy_(scales)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ssmax_multiplies_the_scores_of_each_head_by_s_ln_n(name: str, by_hand: str) -> None:
    ids, stock, model = words(2, LENGTH), build(name), build(name)
    assert heads_of(model) == len(SCALES)
    stock.set_attn_implementation(by_hand)
    with_scales(patch_model(model, native() + SSMax()), SCALES)
    got, expected = logits(model, ids), logits(stock, ids)
    assert torch.allclose(got, expected, atol=1e-4), (got - expected).abs().max()
    cache = DynamicCache(config=model.config)
    model(ids[:, :9], **with_cache(model, cache))
    rest = model(ids[:, 9:], **with_cache(model, cache)).logits
    assert torch.allclose(rest, expected[:, 9:], atol=1e-4)


def test_ssmax_counts_the_keys_that_a_sliding_window_shows() -> None:
    models = [tiny_model("MistralForCausalLM", meta=False) for _ in range(2)]
    ids, (stock, model) = words(2, LENGTH), models
    window = stock.config.sliding_window
    assert window < LENGTH
    AttentionInterface.register("by_keys", scaled_by_keys)
    AttentionMaskInterface.register("by_keys", eager_mask)
    stock.set_attn_implementation("by_keys")
    patch_model(model, native() + SSMax(s=0.7))
    got, expected = logits(model, ids), logits(stock, ids)
    assert torch.allclose(got, expected, atol=1e-4), (got - expected).abs().max()
    scales = next(m for m in model.modules() if type(m).__name__ == "SSMaxMechanism").scale(torch.arange(32)[None])
    started = patch_model(tiny_model("MistralForCausalLM", meta=False), "native + ssmax")
    start = next(m for m in started.modules() if type(m).__name__ == "SSMaxMechanism").scale(torch.arange(32)[None])
    assert float(scales.detach().max()) == pytest.approx(0.7 * math.log(window))
    assert float(start.detach().mean()) == pytest.approx(1.0)


def scaled_by_keys(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attend with scores times 0.7 ln n, n the keys that the mask shows to a query."""
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    seen = (mask == 0).sum(dim=-1, keepdim=True)
    weights = (query @ keys.transpose(2, 3) * scaling * 0.7 * seen.log() + mask).softmax(dim=-1)
    return (weights @ values).transpose(1, 2), None


def test_ssmax_begins_with_a_mean_scale_of_one_over_the_window_and_learns() -> None:
    model = build("llama")
    window = model.config.max_position_embeddings
    patch_model(model, "native + ssmax")
    (part,) = [module for module in model.modules() if type(module).__name__ == "SSMaxMechanism"]
    scales = part.scale(torch.arange(window)[None])
    assert scales.shape == (1, heads_of(model), window)
    assert torch.allclose(scales.mean(dim=-1), torch.ones(1), atol=1e-5)
    model(words(2, LENGTH), labels=words(2, LENGTH)).loss.backward()
    assert part.s.grad is not None
    assert part.s.grad.abs().min() > 0


@pytest.mark.parametrize("scheme", ["native + alibi", "rope + alibi", "native + ssmax", "rope + kerple + ssmax"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padding_caches_and_checkpoints_give_the_same_numbers(name: str, scheme: str, tmp_path: Path) -> None:
    ids, model = words(2, LENGTH), build(name)
    patch_model(model, scheme)
    expected = logits(model, ids)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones_like(ids)], dim=1)
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    got = logits(model, padded, attention_mask=mask, position_ids=positions)[:, 5:]
    assert torch.allclose(got, expected, atol=1e-4)
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))
    hf_posswap.save(model, tmp_path)
    loaded = hf_posswap.load(tmp_path).eval()
    assert torch.equal(logits(loaded, ids), expected)
    assert swap_plan(loaded).scheme == swap_plan(model).scheme
    assert torch.equal(logits(copy.deepcopy(model), ids), expected)


@pytest.mark.slow
def test_no_road_of_stock_classes_leads_to_the_model_without_what_was_added(tmp_path: Path) -> None:
    cases = [
        ("llama", "native + ssmax"),
        ("llama", "native + alibi"),
        ("gpt2", "native + alibi"),
        ("bert", "native + rope"),
    ]
    for number, (name, scheme) in enumerate(cases):
        model, folder = patch_model(build(name), scheme), tmp_path / f"{number} {name}"
        model.save_pretrained(folder)
        native_config(model.config).save_pretrained(folder / "native")
    assert check_roads(tmp_path) == len(cases)


@pytest.mark.slow
def test_a_sum_loads_by_its_own_code_where_the_package_is_missing(tmp_path: Path) -> None:
    for name, scheme in (("llama", "native + ssmax"), ("gpt2", "rope + alibi")):
        fresh.store(patch_model(build(name), scheme), tmp_path / name, words(2, LENGTH))
    found = fresh.load_all(tmp_path, "remote")
    found.pop("side by side")
    assert found.keys() == {"llama", "gpt2"}
    assert all(difference == 0 for found_in in found.values() for difference in found_in.values()), found


def test_stock_transformers_refuses_what_keeps_the_rotation(tmp_path: Path) -> None:
    model = patch_model(build("llama"), "native + alibi")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"pip install hf-posswap"):
        type(build("llama")).from_pretrained(tmp_path)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), type(model))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rope+alibi", Rope() + Alibi()),
        ("native + ssmax:s=0.5", native() + SSMax(s=0.5)),
        ("yarn:factor=4+ssmax", Sum(terms=(make_scheme("yarn", factor=4), SSMax()))),
        ("rope:base=1e+5 + kerple", Rope(base=1e5) + Kerple()),
        ("learned + rope + alibi", Learned() + (Rope() + Alibi())),
        ("alibi + learned", Learned() + Alibi()),
    ],
)
def test_a_sum_is_written_with_plus_signs_and_comes_back_from_its_dict(text: str, expected: Scheme) -> None:
    scheme = make_scheme(text)
    assert scheme == expected
    assert make_scheme(scheme.to_dict()) == scheme
    assert "alibi" + Rope() == Alibi() + Rope()
    assert Rope() + {"name": "alibi"} == Rope() + Alibi()


@pytest.mark.parametrize(
    ("name", "scheme", "says"),
    [
        ("llama", "native", "native .* is not a scheme by itself. Add one to it, as in native \\+ alibi"),
        ("llama", "ssmax", "ssmax .* is not a scheme by itself. Add it to one, as in native \\+ ssmax"),
        ("llama", "native + rope", r"native \(rope, theta 10000\) and rope\(.*\) each rotate queries and keys"),
        (
            "llama",
            "self_extend:window=8,group=2 + alibi",
            "region by region, which takes no bias, so alibi cannot be added",
        ),
        ("llama", "ssmax + ssmax", "only scale queries, so there would be no positions"),
        ("llama", "native +", r"a term of the sum 'native \+' is missing: write it as in native \+ ssmax"),
        ("llama", "+ alibi", "a term of the sum .* is missing"),
        ("llama", "native ++ alibi", "a term of the sum .* is missing"),
        ("llama", "native + ssmx", "unknown scheme 'ssmx'. Did you mean 'ssmax'?"),
        ("bert", "rope + ssmax", "^ssmax needs a causal model; BertForMaskedLM sees both sides"),
        ("bert", "native + ssmax", "^ssmax needs a causal model; BertForMaskedLM sees both sides"),
    ],
)
def test_what_cannot_be_at_work_together_is_refused_before_anything_is_touched(
    name: str, scheme: str, says: str
) -> None:
    model = build(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(PosswapError, match=says):
        patch_model(model, scheme)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not hasattr(model, "_posswap")


@pytest.mark.parametrize(
    ("name", "scheme", "begins"),
    [
        ("llama", "native + alibi", "fine-tuning: the mechanism that the weights know stays"),
        (
            "llama",
            "yarn:factor=2 + ssmax",
            "fine-tuning: the mechanism that the weights know stays, or one they can use",
        ),
        ("gpt2", "native + ssmax", "fine-tuning: the mechanism that the weights know stays"),
        ("gpt2", "rope + ssmax", "required: fine-tuning"),
        ("llama", "p_rope + alibi", "required: fine-tuning"),
    ],
)
def test_a_plan_says_what_the_weights_know_of_a_sum(name: str, scheme: str, begins: str) -> None:
    assert plan_swap(build(name), scheme).adaptation.startswith(begins)


def test_native_is_found_out_and_refused_where_there_is_nothing_to_keep() -> None:
    with pytest.raises(SchemeError, match="angles='dynamic', but those of the model are fixed"):
        plan_swap(build("llama"), Native(angles="dynamic") + Alibi())
    plan = swap_plan(patch_model(build("llama"), native() + "alibi"))
    assert isinstance(plan.scheme, Sum)
    assert plan.scheme.native == Native(angles="fixed")
    plan = swap_plan(patch_model(tiny_model("BloomForCausalLM"), native() + SSMax(s=1.0)))
    assert str(plan.scheme) == "alibi + ssmax(s=1.0)"
    with pytest.raises(UnsupportedSwapError, match="positions both in a table and inside attention"):
        patch_model(tiny_model("MPNetForMaskedLM"), native() + "alibi")
    says = r'^ssmax needs a causal model; the encoder of .*; or {"decoder": the same scheme}, which leaves the encoder'
    with pytest.raises(UnsupportedSwapError, match=says):
        patch_model(tiny_model("BartForConditionalGeneration"), "native + ssmax")


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama", "native + t5"),
        ("llama", "rope + t5"),
        ("llama", "native + nope:logit_scale=0.1"),
        ("llama", "rope + nope:logit_scale=0.1 + t5"),
        ("gpt2", "native + t5"),
        ("gpt2", "learned + nope:logit_scale=0.1"),
    ],
)
def test_what_is_added_may_start_with_no_effect_within_the_window(name: str, scheme: str) -> None:
    model = patch_model(build(name), scheme)
    assert "as they should be: an identity" in verify_swap(model).checks["unswapped model"]
    learned = [module.table for module in model.modules() if type(module).__name__ == "T5Mechanism"]
    for table in learned:
        nn.init.normal_(table)
        assert "are up to" in verify_swap(model).checks["unswapped model"]
    attention = next(module for module in model.modules() if module._forward_pre_hooks and hasattr(module, "layer_idx"))
    attention._forward_pre_hooks.clear()
    with pytest.raises(PosswapError):
        verify_swap(model)


def test_layers_without_rotation_stay_as_they_are_and_the_plan_says_so() -> None:
    model = tiny_model("SmolLM3ForCausalLM")
    still = [layer for layer, rotates in enumerate(model.config.no_rope_layers) if not rotates]
    assert still
    plan = swap_plan(patch_model(model, native() + "alibi"))
    assert plan.notes == (f"Layers without rotation stay as they are: {', '.join(map(str, still))}.",)


class Wrong(Mechanism):
    """A bias with one fault."""

    biases = True

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.distance_only = fault == "distances"
        self.slopes = torch.ones(4) if fault == "slopes" else None
        self.m = nn.Parameter(torch.ones((), dtype=torch.float32))
        if fault == "one unused":
            self.other = nn.Parameter(torch.ones((), dtype=torch.float32))
        if fault == "buffer":
            self.register_buffer("angles", torch.ones(4), persistent=False)
        if fault == "width":
            self.biases, self.rotates, self.head_dim = False, True, 3

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distances = query_positions[:, None, :, None] - key_positions[:, None, None]
        m = self.m.detach() if self.fault == "gradient" else self.m
        bias = -m * distances.float() ** 2
        if self.fault == "heads":
            return bias.expand(-1, 3, -1, -1)
        if self.fault == "nan gradient":  # the root of a distance of 0 has a slope of infinity, times 0
            return -(m * distances.float().abs()).sqrt().expand(-1, 4, -1, -1)
        if self.fault in ("keys", "queries", "rows"):
            seen = {"keys": key_positions.max(), "queries": query_positions.max(), "rows": len(query_positions)}
            bias = bias / (1 + seen[self.fault])
        if self.fault == "nan":
            return bias.expand(-1, 4, -1, -1) * math.nan
        if self.fault == "raises":
            raise ZeroDivisionError("of a scheme")
        return bias.expand(-1, 4, -1, -1).to(torch.float64 if self.fault == "dtype" else torch.float32)

    def distance_bias(self, distances: Tensor) -> Tensor:
        return -distances.float().abs().expand(4, -1)


class Turning(Mechanism):
    """A rotation by the distance from the first token of the call."""

    rotates, head_dim = True, 16

    def prepare(self, positions: Tensor, length: Tensor) -> Any:
        return ((positions - positions.min()) % 2 == 0)[:, None, :, None]

    def rotate_query(self, query: Tensor, prepared: Any) -> Tensor:
        return torch.where(prepared, query, -query)

    rotate_key = rotate_query


class Unflagged(Wrong):
    """A scale whose flag is not set."""

    def scale(self, query_positions: Tensor) -> Tensor:
        return query_positions.float()


class WrongScheme(Scheme):
    """A scheme whose mechanism has a fault; never registered."""

    name = "wrong"
    summary = "a bias with a fault"
    source = "https://example.org"
    kind: Kind = "bias"  # type: ignore[misc]
    fault = ""

    def mechanism(self, geometry: Any) -> Mechanism:
        if self.fault == "turning":
            return Turning()
        return Unflagged(self.fault) if self.fault == "scale" else Wrong(self.fault)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("biased", "Mine: kind is 'biased', expected one of 'rotary', 'bias', 'table', 'none', 'mixed'"),
        ("none", "Mine: its mechanism would never be used, because kind 'none'"),
        ("table", "Mine: its mechanism would never be used, because kind 'table'"),
    ],
)
def test_a_kind_under_which_the_mechanism_would_not_act_is_refused(kind: str, says: str) -> None:
    with pytest.raises(SchemeError, match=says):
        type("Mine", (WrongScheme,), {"kind": kind})
    with pytest.raises(SchemeError, match="derive it from TableScheme"):
        type("Mine", (Scheme,), {"kind": "table"})


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("heads", r"bias of Wrong gives \[2, 3, 3, 4\], expected \[1, 4, 3, 4\] or \[2, 4, 3, 4\]"),
        ("dtype", r"bias of Wrong gives torch.float64, expected torch.float32"),
        ("nan", r"bias of Wrong gives values that are not numbers"),
        ("raises", r"bias of Wrong raises ZeroDivisionError: of a scheme"),
        ("distances", r"distance_bias of Wrong differs from `bias` by"),
        ("slopes", r"slopes of Wrong differs from `bias` by"),
        ("gradient", r"parameter m of Wrong gets no gradient"),
        ("one unused", r"parameter other of Wrong gets no gradient"),
        ("nan gradient", r"parameter m of Wrong gets a gradient of nan"),
        (
            "scale",
            r"scale of Unflagged is never called, because scales is False, expected the class to set scales = True",
        ),
        (
            "keys",
            r"bias of Wrong differs from itself by .*, expected the same for a query and a key, whatever the others",
        ),
        ("queries", r"bias of Wrong differs from itself by"),
        ("rows", r"bias of Wrong differs from itself by"),
        ("buffer", r"buffer angles of Wrong is rounded by model.to\(torch.bfloat16\), expected a plain attribute"),
        ("turning", r"rotate_query of Turning differs from itself by .*, expected the same for a token"),
        ("width", r"head_dim of Wrong is 3, expected the width of a head"),
    ],
)
def test_a_part_that_would_break_a_forward_is_refused_by_its_name(
    fault: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WrongScheme, "fault", fault)
    model = build("llama")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(SchemeError, match=says):
        patch_model(model, WrongScheme())
    assert list(model.state_dict()) == list(state)


def test_pieces_that_depend_on_the_other_tokens_of_a_call_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism: Any = type(patch_model(build("llama"), "rerope", window=8).model.posswap)
    whole = mechanism.pieces
    for argument in (0, 1):

        def pieces(self: Any, *positions: Tensor, keys: Any = "raw", moved: int = argument) -> Any:
            given = list(positions)
            given[moved] = given[moved] + given[1].max()
            return whole(self, *given, keys=keys)

        monkeypatch.setattr(mechanism, "pieces", pieces)
        name = ("rotate_query", "rotate_key")[argument]
        with pytest.raises(SchemeError, match=f"{name} of a piece of .* differs from itself by"):
            plan_swap(build("llama"), "rerope", window=8)


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("traits", property(lambda self: None), "traits of Mine gives None, expected a value of type Traits"),
        ("traits", lambda self: Traits(), "traits of Mine gives <bound method .*, expected a value of type Traits"),
        ("resolve", lambda *_: None, "resolve of Mine gives None, expected a value of type Scheme"),
        (
            "mechanism",
            lambda *_: nn.Identity(),
            "mechanism of Mine gives Identity.*, expected a value of type Mechanism",
        ),
        ("notes", lambda self: "one", "notes of Mine gives 'one', expected a value of type tuple"),
        ("reach", lambda *_: 64.5, "reach of Mine gives 64.5, expected a value of type int"),
    ],
)
def test_a_part_of_another_type_is_refused_by_its_name(part: str, value: Any, says: str) -> None:
    mine: Any = type("Mine", (WrongScheme,), {part: value})
    for scheme in (mine(), PerLayer(layers={0: mine()}, default=Alibi())) if part == "traits" else (mine(),):
        with pytest.raises(SchemeError, match=says):
            plan_swap(build("llama"), scheme)


def test_a_picture_shows_what_native_stands_for_or_is_refused() -> None:
    rotary, plain = locate(build("llama")).geometry, locate(build("gpt2")).geometry
    drawn, named = shown(native() + Alibi(), rotary), shown(Rope() + Alibi(), rotary)
    assert torch.equal(scores_by_distance(drawn, AT), scores_by_distance(named, AT))
    for scheme, geometry, says in ((native() + Alibi(), plain, "none is given here"), (SSMax(), rotary, "draw a sum")):
        with pytest.raises(OptionError, match=says):
            shown(scheme, geometry)


@pytest.mark.parametrize("scheme", ["native + ssmax", "rope + alibi + ssmax"])
def test_padding_whose_positions_are_below_zero_makes_no_row_nan(scheme: str) -> None:
    ids, model = words(2, LENGTH), patch_model(build("llama"), scheme)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones_like(ids)], dim=1)
    got = logits(model, padded, attention_mask=mask, position_ids=mask.cumsum(dim=-1) - 1)  # -1 where padded
    assert bool(got.isfinite().all())
    assert torch.allclose(got[:, 5:], logits(model, ids), atol=1e-4)


def test_a_kept_rotation_beyond_its_window_or_that_follows_the_length_is_told() -> None:
    plan = plan_swap(build("llama"), "native + alibi", max_length=4096)
    assert any("angles that the weights have not seen" in note for note in plan.notes)
    assert paged_problem(plan_swap(build("llama"), "native + alibi")) is None
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    problem = paged_problem(plan_swap(build("llama", rope_parameters=dynamic), "native + alibi"))
    assert problem is not None
    assert "follows the length" in problem


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_layer_may_have_a_sum(name: str) -> None:
    ids, model, same = words(2, LENGTH), build(name), build(name)
    patch_model(model, {0: "rope + alibi", 1: "rope + alibi"})
    patch_model(same, "rope + alibi")
    assert torch.allclose(logits(model, ids), logits(same, ids), atol=1e-5)
    assert verify_swap(model)


def test_a_scheme_that_splits_queries_keeps_its_backends_in_a_sum() -> None:
    geometry = locate(build("llama")).geometry
    scheme = make_scheme("dynamic:follow=query,factor=8,original_length=8")
    alone, added = (each.resolve(geometry, 64).mechanism(geometry) for each in (scheme, scheme + SSMax()))
    assert backends_of(added) == backends_of(alone) == ("merge", "plain")
    model, ids = patch_model(build("llama"), scheme + SSMax(), max_length=64), words(2, LENGTH)
    plain = logits(model, ids)  # too short for another backend
    set_backend(model, "merge")
    assert torch.allclose(logits(model, ids), plain, atol=1e-4)
