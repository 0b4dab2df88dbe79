"""Keys that stand later than their query: the mask decides what is seen, positions decide how; of every scheme.

The oracle is stock transformers: where a scheme says of past keys what the stock model says, it must say of later keys
what that says, as soon as a mask shows them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, Gemma3TextModel
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posswap import load, patch_model, plan_swap, set_backend, swap_plan, verify_swap
from hf_posswap.errors import PosswapError, SchemeError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.geometry import Geometry
from hf_posswap.patching.inspect.describe import stand_ins
from hf_posswap.schemes import SCHEMES, Scheme, schemes_for
from hf_posswap.schemes.base import Kind
from hf_posswap.schemes.common.bias import DistanceMechanism
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.testing.tiny import tiny_model
from tests.contract.models import build
from tests.contract.pairs import CHANGE, NOISE, gap, words
from tests.stock import RELEASE

LENGTH, PREFIX = 20, 7
IDS = words(2, LENGTH)
AT = torch.arange(LENGTH)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
BOTH_WAYS = CAUSAL | (AT < PREFIX)
"""The first tokens see each other."""
IMAGE = (AT < PREFIX).long().expand(2, -1)
"""The first tokens are of one image."""
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: build("gpt2"),
    "llama": lambda: build("llama"),
    "gemma3": lambda: tiny_model("Gemma3ForConditionalGeneration", meta=False),
    "paligemma": lambda: tiny_model("PaliGemmaForConditionalGeneration", meta=False),
}
SHOWING: dict[str, Any] = {
    "gpt2": ({"attention_mask": CAUSAL}, {"attention_mask": BOTH_WAYS}),
    "llama": ({"attention_mask": CAUSAL}, {"attention_mask": BOTH_WAYS}),
    "gemma3": ({"token_type_ids": IMAGE * 0}, {"token_type_ids": IMAGE}),
    "paligemma": ({"token_type_ids": IMAGE * 0 + 1}, {"token_type_ids": 1 - IMAGE}),
}
"""What has a model read causally, and what shows it that the first tokens stand side by side."""


@functools.cache
def stock(name: str) -> Any:
    return MODELS[name]()


def options_of(name: str, scheme: str) -> dict[str, Any]:
    options = stand_ins(scheme, locate(stock(name)).geometry)
    if "init_std" in getattr(SCHEMES.get(scheme), "__dataclass_fields__", {}):
        options["init_std"] = 1.0
    return {"max_length": 32 if scheme == "blend" else 64, **options}


@functools.cache
def swapped(name: str, scheme: str) -> Any:
    return patch_model(MODELS[name](), scheme, **options_of(name, scheme))


@functools.cache
def is_refused(name: str, scheme: str) -> bool:
    """Return whether the swap is refused, by its plan: to plan one takes a tenth of what a swap does."""
    try:
        plan_swap(stock(name), scheme, **options_of(name, scheme))
    except (UnsupportedSwapError, SchemeError):
        return True
    return False


def known(*names: str) -> list[Any]:
    found = [(name, scheme) for name in names for scheme in schemes_for("text") if not is_refused(name, scheme)]
    return [pytest.param(*one, id="-".join(one)) for one in found]


def has_regions(model: Any) -> bool:
    return any(one.regions is not None for one in model.modules() if isinstance(one, Mechanism))


def read(model: Any, ids: Tensor = IDS, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **given).logits


@pytest.mark.parametrize(("name", "scheme"), known(*MODELS))
def test_what_a_mask_shows_is_seen_as_in_stock(name: str, scheme: str) -> None:
    native, model = stock(name), swapped(name, scheme)
    causal, shown = SHOWING[name]
    theirs, ours = ([read(one, **given)[:, :PREFIX] for given in (causal, shown)] for one in (native, model))
    assert gap(*theirs) > CHANGE
    assert gap(*ours) > CHANGE
    says_the_same = gap(theirs[0], ours[0]) < NOISE
    if says_the_same:
        assert gap(theirs[1], ours[1]) < NOISE
    assert says_the_same or name == "gpt2" or not has_regions(model)  # which are exact so near


@pytest.mark.parametrize(("name", "scheme"), known("llama"))
def test_order_matters_by_positions_alone(name: str, scheme: str) -> None:
    """The tokens of a prefix in another order, each at its position: the mask hides nothing of it."""
    model, order = swapped(name, scheme), torch.arange(LENGTH)
    order[:PREFIX] = torch.tensor([5, 2, 6, 0, 3, 1, 4])
    found = read(model, IDS[:, order], attention_mask=BOTH_WAYS, position_ids=AT[order].expand(2, -1))
    expected = read(model, attention_mask=BOTH_WAYS, position_ids=AT.expand(2, -1))
    assert gap(found, expected[:, order]) < NOISE


@pytest.mark.parametrize(("name", "scheme"), known("llama"))
def test_ids_that_begin_anew_hide_nothing_of_what_a_mask_shows(name: str, scheme: str) -> None:
    """One text whose ids begin anew, under a mask of ones: not two documents."""
    model, at = swapped(name, scheme), (AT % 13).expand(2, -1)
    documents = CAUSAL & ((AT < 13) == (AT < 13)[:, None])
    found = read(model, attention_mask=torch.ones_like(IDS), position_ids=at)
    assert gap(found, read(model, attention_mask=CAUSAL, position_ids=at)) < NOISE
    assert gap(found, read(model, attention_mask=documents, position_ids=at)) > CHANGE
    if gap(read(model), read(stock(name))) < NOISE:
        assert gap(found, read(stock(name), attention_mask=torch.ones_like(IDS), position_ids=at)) < NOISE


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("name", "scheme"), known("gemma3"))
def test_what_generate_reads_is_seen(name: str, scheme: str, kind: str) -> None:
    model = swapped(name, scheme)
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "output_logits": True,
                "return_dict_in_generate": True}  # fmt: skip
    if kind == "static":
        if RELEASE < (5, 23):
            pytest.skip("stock Gemma 3 reads its token types past their end beside a static cache")
        settings |= {"cache_implementation": "static", "disable_compile": True}
    out = model.generate(IDS, attention_mask=torch.ones_like(IDS), token_type_ids=IMAGE, **settings)
    text = out.sequences
    types = torch.nn.functional.pad(IMAGE, (0, text.shape[1] - LENGTH))
    whole = read(model, text, attention_mask=torch.ones_like(text), token_type_ids=types)
    found = torch.stack(out.logits, dim=1)
    assert gap(found, whole[:, LENGTH - 1 : -1]) < NOISE
    assert gap(found[:, 0], read(model, token_type_ids=IMAGE * 0)[:, -1]) > CHANGE


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("scheme", ["self_extend", "dual_chunk"])
@pytest.mark.usefixtures("stock_compiles")
def test_a_compiled_model_sees_it_too(scheme: str, backend: str) -> None:
    model = build("llama")
    patch_model(model, scheme, max_length=64)
    set_backend(model, backend)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for mask in (BOTH_WAYS, CAUSAL):
            found = compiled(input_ids=IDS, attention_mask=mask, use_cache=False).logits
            assert gap(found, read(model, attention_mask=mask, use_cache=False)) < NOISE


@pytest.mark.parametrize(("left_out", "count"), [(1, 0), (2, 0), (None, 2)])
def test_a_piece_that_is_missing_or_twice_there_is_refused_before_a_mask_shows_its_keys(
    left_out: int | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SCHEMES.get("rerope").region_positions

    def regions(self: Any) -> tuple[Any, ...]:
        found = whole(self)
        return found + found[:1] if left_out is None else found[:left_out] + found[left_out + 1 :]

    model = build("llama")
    before = model(IDS).logits
    monkeypatch.setattr(SCHEMES.get("rerope"), "region_positions", regions)
    with pytest.raises(SchemeError, match=f"rerope: the query at position .* belong to {count} of its pieces"):
        patch_model(model, "rerope", window=8)
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_decoder_that_sees_both_sides_by_its_config_is_swapped_as_an_encoder(implementation: str) -> None:
    """With is_causal=False in the config, transformers runs a decoder both ways; T5's own buckets are the oracle."""
    model, oracle = (tiny_model("LlamaModel", meta=False) for _ in range(2))
    for one in (model, oracle):
        one.config.is_causal = False
        one.set_attn_implementation(implementation)
    with pytest.raises(UnsupportedSwapError, match="nope needs a causal model; LlamaModel sees both sides"):
        plan_swap(model, "nope")
    patch_model(model, "t5", init_std=1.0)
    distances = AT[None] - AT[:, None]
    buckets = T5Attention._relative_position_bucket(distances, bidirectional=True)
    bias = model.posswap.table.detach()[buckets].permute(2, 0, 1).expand(len(IDS), -1, -1, -1)
    with torch.no_grad():  # at position 0 everywhere nothing rotates
        expected = oracle(IDS, attention_mask=bias, position_ids=torch.zeros_like(IDS)).last_hidden_state
        assert gap(model(IDS).last_hidden_state, expected) < NOISE


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", ["alibi", "kerple", "rope + alibi"])
def test_a_call_for_both_sides_sees_what_a_mask_shows(scheme: str, implementation: str) -> None:
    model = patch_model(build("llama"), scheme)
    model.set_attn_implementation(implementation)
    expected = read(model, attention_mask=torch.ones_like(CAUSAL))
    assert gap(expected, read(model)) > CHANGE
    assert gap(read(model, is_causal=False), expected) < NOISE
    model.config.is_causal = False
    assert gap(read(model), expected) < NOISE


@pytest.mark.parametrize("scheme", ["t5", "xpos", "self_extend", "rope + t5", "per_layer"])
def test_a_call_for_both_sides_is_refused_where_the_scheme_was_made_for_one(scheme: str, tmp_path: Path) -> None:
    chosen: Any = {0: "t5", 1: "rope"} if scheme == "per_layer" else scheme
    model = patch_model(build("llama"), chosen, max_length=64)
    model.save_pretrained(tmp_path)
    for one in (model, load(tmp_path)):
        before = read(one)
        with pytest.raises(UnsupportedSwapError, match="LlamaModel was called with is_causal=False.*leave is_causal"):
            read(one, is_causal=False)
        assert torch.equal(read(one, is_causal=True), before)
        one.config.is_causal = False
        with pytest.raises(UnsupportedSwapError, match="LlamaModel was called with is_causal=False"):
            read(one)
        with pytest.raises(PosswapError, match="config was changed after the swap so that a token sees both sides"):
            verify_swap(one)
        del one.config.is_causal
        assert torch.equal(read(one), before)


@pytest.mark.parametrize("built_for_both", [False, True])
def test_what_gemma_3_sees_is_read_from_its_config_at_every_forward(built_for_both: bool) -> None:
    shape = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 2}
    model = Gemma3TextModel(Gemma3TextConfig(**shape, **heads, initializer_range=0.5)).eval()
    model.config.use_bidirectional_attention = built_for_both  # the model makes its masks by it
    oracle = copy.deepcopy(model)
    patch_model(model, "t5", init_std=1.0)
    assert swap_plan(model).sites.geometry.causal is not built_for_both
    distances = AT[None] - AT[:, None]
    buckets = T5Attention._relative_position_bucket(distances, bidirectional=built_for_both)
    bias = model.posswap.table.detach()[buckets].permute(2, 0, 1).expand(len(IDS), -1, -1, -1)
    bias = bias if built_for_both else bias.masked_fill(~CAUSAL, -torch.inf)
    at_zero = {"position_ids": torch.zeros_like(IDS)}  # nothing rotates
    with torch.no_grad():
        expected = oracle(IDS, attention_mask={"full_attention": bias}, **at_zero).last_hidden_state
        assert gap(model(IDS).last_hidden_state, expected) < NOISE
        model.config.use_bidirectional_attention = not built_for_both
        with pytest.raises(UnsupportedSwapError, match=f"made for is_causal={not built_for_both}.*use_bidirectional"):
            model(IDS)
        with pytest.raises(PosswapError, match="config was changed after the swap so that a token sees"):
            verify_swap(model)


class Flagged(DistanceMechanism):
    """Goes by a flag, which no tensor shows."""

    def __init__(self, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal

    def distance_bias(self, distances: Tensor) -> Tensor:
        return -(distances if self.causal else distances.abs()).float().expand(self.heads, -1)


class FlaggedScheme(Scheme):
    """A scheme of one's own that asks whether the model is causal."""

    name = "flagged"
    summary = "a bias by the direction, where there is one"
    source = "https://example.org"
    kind: Kind = "bias"  # type: ignore[misc]

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return Flagged(geometry.num_heads, geometry.causal)


def test_a_scheme_that_keeps_only_a_flag_of_what_is_seen_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES._items, "flagged", FlaggedScheme)
    model = patch_model(build("llama"), FlaggedScheme())
    with pytest.raises(UnsupportedSwapError, match="was made for is_causal=True"):
        read(model, is_causal=False)


def test_a_call_for_one_side_is_refused_where_the_scheme_was_made_for_both() -> None:
    model = tiny_model("LlamaModel", meta=False)
    model.config.is_causal = False
    patch_model(model, "t5", init_std=1.0)
    with pytest.raises(UnsupportedSwapError, match="was made for is_causal=False"), torch.no_grad():
        model(IDS, is_causal=True)
