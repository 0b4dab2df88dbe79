"""Position ids that a stock class drops without a word are obeyed after a swap, or refused: on every class there is."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.auto import modeling_auto

import hf_posswap
from hf_posswap import patch_model, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import PositionRangeError, PositionShapeError, PosswapError, UnsupportedSwapError
from hf_posswap.families.locating import family_of, locate
from hf_posswap.patching.inspect.describe import stand_ins
from hf_posswap.patching.sites.attention.positions import PassPositionIds, check_fits
from hf_posswap.schemes import Alibi, Blend, schemes_for
from hf_posswap.testing.contract.models import copied
from hf_posswap.testing.tiny import tiny_model
from tests.contract.pairs import CHANGE, NOISE, gap
from tests.families.single import words
from tests.stock import cache_in, with_cache

HOLES = (0, 1, 2, 5, 6, 9, 10, 11)
"""Where the tokens stand."""
WHOLE = HOLES[-1] + 1
IDS = words(2, len(HOLES))
POSITIONS = torch.tensor([HOLES])
ONE_STACK = [
    "BloomForCausalLM",
    "BloomForTokenClassification",
    "BloomModel",
    "MptForCausalLM",
    "MptForQuestionAnswering",
    "RoFormerForMaskedLM",
    "FalconForTokenClassification",
    "BartForCausalLM",
    "T5ForTokenClassification",
]
TWO_STACKS = ["BartForConditionalGeneration", "T5ForConditionalGeneration", "M2M100Model"]


TABLES = ("sinusoidal", "learned", "together")
"""Schemes that are, in part, rows of a table: they count tokens by their index, and refuse other ids."""


def swapped(name: str, scheme: Any = "rope", **options: Any) -> Any:
    """Return a tiny model of the class `name` with `scheme` inside its attention."""
    model = tiny_model(getattr(transformers, name), meta=False)
    patch_model(model, scheme, **{"site": "attention", **options})
    return model


def spread() -> tuple[Tensor, Tensor]:
    """Return the tokens where they stand, [2, WHOLE], others between them, and the mask that hides those."""
    ids, mask = words(2, WHOLE, seed=7), torch.zeros(2, WHOLE, dtype=torch.long)
    ids[:, HOLES], mask[:, HOLES] = IDS, 1
    return ids, mask


def first(model: Any, **inputs: Any) -> Tensor:
    """Return what the model gives first."""
    with torch.no_grad():
        return model(**inputs)[0]


def of_decoder(model: Any, **inputs: Any) -> Tensor:
    """Return the decoder's states: a head may shift what it is given."""
    return first(model.base_model if hasattr(model.base_model, "decoder") else model, **inputs)


@pytest.mark.parametrize("scheme", ["rope", "alibi"])
@pytest.mark.parametrize("name", ONE_STACK)
def test_holes_are_what_hidden_tokens_in_them_would_be(name: str, scheme: str) -> None:
    model = swapped(name, scheme)
    ids, mask = spread()
    at = torch.arange(WHOLE)[None] + locate(model).first_position  # some classes count the tokens of the mask
    expected = first(model, input_ids=ids, attention_mask=mask, position_ids=at)[:, HOLES]
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    shifted = POSITIONS + locate(model).first_position
    assert gap(first(model, **given, position_ids=shifted), expected) < NOISE
    assert gap(first(model, **given), expected) > CHANGE
    verify_swap(model)


PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
"""Two documents in one row, as ids tell them where there is no mask."""


DEAF: list[tuple[str, dict[str, Any]]] = [("mpt", {}), ("falcon", {"alibi": True}), ("BartForCausalLM", {})]


@pytest.mark.parametrize(
    ("name", "changes", "scheme"),
    [("bloom", {}, scheme) for scheme in schemes_for("text") if scheme not in TABLES]
    + [(*deaf, scheme) for deaf in DEAF for scheme in ("rope", "alibi", "self_extend")],
)
def test_packed_documents_are_not_read_as_half_of_one_text(name: str, changes: dict[str, Any], scheme: str) -> None:
    """Where the stock class drops the ids, and makes its mask without them."""
    stock, model = tiny_model(name, meta=False, **changes), tiny_model(name, meta=False, **changes)
    options = stand_ins(scheme, locate(model).geometry) | ({"init_std": 1.0} if scheme in ("t5", "kerple") else {})
    try:
        patch_model(model, scheme, max_length=32 if scheme == "blend" else 64, **options)
    except PosswapError:
        pytest.skip("this scheme is not for this model")
    assert gap(first(stock, input_ids=IDS, position_ids=PACKED), first(stock, input_ids=IDS)) == 0
    one_text = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    heard = gap(first(model, **one_text, position_ids=PACKED), first(model, **one_text)) > CHANGE
    assert heard == (scheme != "nope")
    for cache in ({"use_cache": True}, {"use_cache": False}, with_cache(model, transformers.DynamicCache())):
        given = {"input_ids": IDS, "position_ids": PACKED, **cache}
        if not heard:
            with contextlib.suppress(UnsupportedSwapError):
                assert gap(first(model, **given), first(model, **one_text)) < NOISE
            continue
        with pytest.raises(UnsupportedSwapError, match=r"begin anew were given to \w+ without an attention_mask.*What"):
            first(model, **given)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, way) for name in ("opt", "xglm", "biogpt", "openai-gpt") for way in ("eager", "sdpa")]
    + [("opt", "flex_attention")],
)
def test_packed_documents_are_refused_where_a_class_takes_ids_and_makes_its_mask_without_them(
    name: str, implementation: str
) -> None:
    model = tiny_model(name, meta=False)
    model.set_attn_implementation(implementation)
    given = {"input_ids": IDS, "position_ids": PACKED, "use_cache": False}
    if name == "openai-gpt":
        del given["use_cache"]  # it has none
    first(model, **given)
    patch_model(model, "alibi")
    with pytest.raises(UnsupportedSwapError, match=r"begin anew were given to \w+ without an attention_mask.*What"):
        first(model, **given)
    first(model, **given, attention_mask=torch.ones_like(IDS))
    first(model, **(given | {"position_ids": torch.arange(IDS.shape[1])[None]}))


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, way) for name in ("gpt2", "llama", "gpt_neo", "ctrl", "gptj") for way in ("eager", "sdpa")]
    + [("llama", "flex_attention")],
)
def test_packed_documents_stay_apart_where_a_class_masks_by_its_ids(name: str, implementation: str) -> None:
    model = tiny_model(name, meta=False)
    if name != "ctrl":  # it has its own attention
        model.set_attn_implementation(implementation)
    patch_model(model, "alibi")
    starts = (PACKED[0].diff() <= 0).nonzero()[-1].item() + 1
    others = torch.where(torch.arange(IDS.shape[1]) < starts, 7, IDS)
    given = {"position_ids": PACKED, "use_cache": False}
    assert (
        gap(first(model, input_ids=IDS, **given)[:, starts:], first(model, input_ids=others, **given)[:, starts:]) == 0
    )


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("gpt2", "learned"), ("gpt2", "together"), ("gpt2", Blend(new=Alibi(), weight=0.5)), ("gpt2", "sinusoidal")],
    ids=str,
)
def test_documents_packed_into_one_row_need_no_table_as_long_as_the_row(name: str, scheme: Any) -> None:
    model = tiny_model(name, meta=False)
    patch_model(model, scheme)
    documents = [words(1, length, seed=length) for length in (20, 32, 9)]
    assert swap_plan(model).max_length == 32
    packed = {"input_ids": torch.cat(documents, 1), "use_cache": False}
    given = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
    apart = torch.cat([first(model, input_ids=ids, use_cache=False) for ids in documents], 1)
    assert gap(first(model, **packed, position_ids=given), apart) < NOISE
    with pytest.raises(PositionRangeError, match="asked for 33 positions, but its position table ends at 32"):
        first(model, **packed, position_ids=given + 1)
    with pytest.raises(PositionRangeError, match="asked for 61 positions"):
        first(model, **packed)


@pytest.mark.parametrize("name", ["llama", "gptj", "falcon"])
def test_packed_documents_are_what_stock_takes_them_for(name: str) -> None:
    """Where the stock class goes by the ids: apart, or, in Falcon, seeing each other."""
    stock, model = tiny_model(name, meta=False), tiny_model(name, meta=False)
    patch_model(model, "rope", site="attention")
    given = {"input_ids": IDS, "position_ids": PACKED, "use_cache": False}
    assert gap(first(model, **given), first(stock, **given)) < NOISE
    assert gap(first(model, **given), first(stock, input_ids=IDS, use_cache=False)) > CHANGE


@pytest.mark.parametrize("scheme", ["rope", "alibi"])
@pytest.mark.parametrize("name", TWO_STACKS)
def test_each_of_two_stacks_has_its_own(name: str, scheme: str) -> None:
    model = swapped(name, scheme)
    at = POSITIONS + locate(model).first_position
    ids, mask = spread()
    plain = {"input_ids": IDS, "decoder_input_ids": IDS}
    before = first(model, **plain)
    encoder = first(model, input_ids=ids, attention_mask=mask, decoder_input_ids=IDS)
    found = first(model, **plain, position_ids=at)
    assert gap(found, encoder) < NOISE
    decoder = first(model, input_ids=IDS, decoder_input_ids=ids, decoder_attention_mask=mask)[:, HOLES]
    found = first(model, **plain, decoder_position_ids=at)
    assert gap(found, decoder) < NOISE
    assert gap(encoder, before) > NOISE
    assert gap(decoder, before) > NOISE
    assert gap(first(model, **plain), before) == 0
    cut = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}  # they are as long as their own tokens
    assert torch.isfinite(first(model, **cut, position_ids=at, decoder_position_ids=at[:, :5])).all()


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MptForCausalLM", "BartForCausalLM"])
def test_a_cache_holds_the_keys_where_they_were_said_to_stand(name: str) -> None:
    model = swapped(name, "rope")
    expected = first(model, input_ids=IDS, position_ids=POSITIONS)
    cache, parts = None, []
    for start, stop in ((0, 4), (4, 5), (5, 8)):
        with torch.no_grad():
            out = model(
                input_ids=IDS[:, start:stop],
                position_ids=POSITIONS[:, start:stop],
                **with_cache(model, cache),
                use_cache=True,
            )
        cache = cache_in(out)
        parts.append(out.logits)
    assert gap(torch.cat(parts, dim=1), expected) < NOISE


@pytest.mark.parametrize("scheme", ["rope", "alibi"])
def test_generate_counts_on_from_given_positions(scheme: str) -> None:
    model = swapped("BloomForCausalLM", scheme)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    ids, mask = spread()
    ids[1, 0], mask[1, 0] = 1, 0  # a row with padding on the left
    padding = torch.tensor([[0], [1]])
    at = (torch.arange(WHOLE)[None] - padding).clamp(min=0)
    expected = model.generate(ids, attention_mask=mask, position_ids=at, **options)[:, WHOLE:]
    at = (POSITIONS - padding).clamp(min=0)
    found = model.generate(IDS, attention_mask=mask[:, HOLES], position_ids=at, **options)
    assert torch.equal(found[:, len(HOLES) :], expected)
    counted = model.generate(IDS, **options)
    far = torch.arange(len(HOLES)).expand(2, -1) + 17
    assert torch.equal(model.generate(IDS, position_ids=far, **options), counted)


@pytest.mark.parametrize("way", ["base", "deepcopy", "torch.save"])
def test_inner_models_and_copies_hear_as_well(way: str) -> None:
    model = swapped("BloomForCausalLM")
    expected = first(model, input_ids=IDS, position_ids=POSITIONS)
    if way == "base":
        with torch.no_grad():
            states = model.transformer(IDS, position_ids=POSITIONS).last_hidden_state
            assert gap(model.lm_head(states), expected) < NOISE
        return
    twin = copied(model, way)
    assert gap(first(twin, input_ids=IDS, position_ids=POSITIONS), expected) == 0
    unpatch_model(twin)
    native = first(twin, input_ids=IDS)
    assert gap(first(twin, input_ids=IDS, position_ids=POSITIONS), native) == 0  # as stock is
    assert gap(first(model, input_ids=IDS, position_ids=POSITIONS), expected) == 0


@pytest.mark.parametrize("name", ["FalconForTokenClassification", "BloomForCausalLM"])
def test_what_a_failed_forward_was_given_is_forgotten(name: str) -> None:
    model = swapped(name, "alibi")
    expected = first(model, input_ids=IDS)
    inner = model.transformer
    expected_inner = first(inner, input_ids=IDS)
    with pytest.raises(ValueError, match="specify exactly one"):
        model(input_ids=IDS, inputs_embeds=torch.zeros(2, 8, 16), position_ids=POSITIONS)
    model.forward, forward = None, model.forward
    with pytest.raises(TypeError):
        model(input_ids=IDS, position_ids=POSITIONS)  # it does not even come to the inner model
    model.forward = forward
    assert gap(first(inner, input_ids=IDS), expected_inner) == 0
    assert gap(first(model, input_ids=IDS), expected) == 0


@pytest.mark.parametrize(
    ("name", "scheme", "options", "why"),
    [
        ("BartForConditionalGeneration", "learned", {"site": "auto"}, "so would stock transformers"),
        ("FalconForTokenClassification", "yarn", {"site": "auto", "factor": 2.0}, "so would stock transformers"),
        ("T5ForConditionalGeneration", {"decoder": "rope"}, {"site": "auto"}, "counts the positions of its encoder"),
        ("LongT5ForConditionalGeneration", "rope", {}, "no swap reaches its encoder"),
        ("BartForCausalLM", {"name": "blend", "new": "rope"}, {"site": "auto"}, "counts the positions of its decoder"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(name: str, scheme: Any, options: dict[str, Any], why: str) -> None:
    model = swapped(name, scheme, **options)
    given = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    before = first(model, input_ids=IDS, **given)
    with pytest.raises(UnsupportedSwapError, match=f"{name} was given position_ids, which .* drops: .*{why}.* Leave"):
        model(input_ids=IDS, **given, position_ids=POSITIONS)
    assert gap(first(model, input_ids=IDS, **given), before) == 0
    unpatch_model(model)
    first(model, input_ids=IDS, **given, position_ids=POSITIONS)  # which stock drops


def test_one_for_each_token_is_wanted() -> None:
    model = swapped("BloomForCausalLM")
    message = r"position_ids of shape \[1, 3\] were given for tokens of shape \[2, 8\]: give one for each token"
    with pytest.raises(PositionShapeError, match=message):
        model(input_ids=IDS, position_ids=torch.arange(3)[None])
    with pytest.raises(PositionShapeError, match=r"shape \[3, 1, 8\]"):
        model(inputs_embeds=torch.zeros(2, 8, model.config.hidden_size), position_ids=POSITIONS.expand(3, 1, -1))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *(("GPT2LMHeadModel", scheme) for scheme in ("rope", "alibi", "xpos", "self_extend", "learned + rope")),
        *(("LlamaForCausalLM", scheme) for scheme in ("alibi", "self_extend")),
        ("OPTForCausalLM", "rope"),
    ],
)
def test_one_for_each_token_is_wanted_where_the_class_takes_them(name: str, scheme: str) -> None:
    options = {"site": "auto"} if "learned" in scheme else {}
    model = swapped(name, scheme, **options, **({"max_length": 256} if scheme == "self_extend" else {}))
    ids, index = IDS[:1], torch.arange(IDS.shape[1])
    whole = first(model, input_ids=ids, position_ids=index[None])
    wrong = {"[1, 7]": index[None, :-1], "[1, 9]": torch.arange(9)[None], "[1, 1]": index[None, :1], "[8]": index}
    for shape, given in wrong.items():  # a single one would be all tokens' position
        message = f"shape {shape} were given for tokens of shape [1, 8]: give one for each token of this call, or"
        with pytest.raises(PositionShapeError, match=re.escape(message)):
            model(input_ids=ids, position_ids=given)
    with torch.no_grad():
        cache = cache_in(model(input_ids=ids[:, :5], position_ids=index[None, :5], use_cache=True))
    with pytest.raises(PositionShapeError, match="with a cache, only those of the new tokens"):
        model(input_ids=ids[:, 5:], position_ids=index[None], **with_cache(model, copy.deepcopy(cache)))
    steps = first(model, input_ids=ids[:, 5:], position_ids=index[None, 5:], **with_cache(model, cache))
    assert gap(steps, whole[:, 5:]) < NOISE
    rows = first(model, input_ids=IDS, position_ids=index[None])
    assert gap(first(model, input_ids=IDS, position_ids=index.expand(2, -1)), rows) < NOISE


def test_a_class_may_take_ids_in_rows_of_its_own() -> None:
    shared, rows = torch.zeros(3, 2, 8, dtype=torch.long), torch.zeros(4, 2, 8, dtype=torch.long)  # of images and text
    embeds: dict[str, Any] = {"inputs_embeds": torch.zeros(2, 8, 16)}
    for given in ({"input_ids": IDS}, embeds, {"pixel_values": torch.zeros(2, 3, 4)}):
        for ids in (shared, rows):
            check_fits(ids, given, heard=True)
    check_fits(shared[0], {"input_ids": IDS[:, None].expand(2, 4, 8)}, heard=True)  # of several choices
    with pytest.raises(PositionShapeError, match=r"shape \[3, 2, 7\] were given for tokens of shape \[2, 8\]"):
        check_fits(shared[..., 1:], embeds, heard=True)


GONE = "under gradient checkpointing it runs again when they are gone"


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_says_that_they_would_be_gone(reentrant: bool) -> None:
    model = swapped("BloomForCausalLM").train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    with pytest.raises(UnsupportedSwapError, match=GONE):
        model(input_ids=IDS, position_ids=POSITIONS, labels=IDS)
    model(input_ids=IDS, labels=IDS).loss.backward()  # without them nothing is gone
    with torch.no_grad():  # nor where there is no backward
        model(input_ids=IDS, position_ids=POSITIONS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_others_run_again_in_the_backward_say_so_then(reentrant: bool) -> None:
    """As FSDP's activation checkpointing does, of which the model knows nothing."""
    model = swapped("BloomForCausalLM").train()
    block = model.transformer.h[1]
    forward = block.forward
    block.forward = lambda hidden, **given: checkpoint(partial(forward, **given), hidden, use_reentrant=reentrant)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    loss = model(input_ids=IDS, position_ids=POSITIONS, labels=IDS, use_cache=False).loss
    with pytest.raises(UnsupportedSwapError, match=GONE):
        loss.backward()


def test_a_sinusoid_that_counts_from_the_padding_id_counts_so_with_a_mask_too() -> None:
    """M2M100 calls position 0 its padding id + 1, dynamic scaling reads the length off positions: masks change none."""
    model = swapped("M2M100Model", {"name": "dynamic", "factor": 2.0, "original_length": 4})
    bare = first(model, input_ids=IDS, decoder_input_ids=IDS)
    ones = torch.ones_like(IDS)
    masked = first(model, input_ids=IDS, decoder_input_ids=IDS, attention_mask=ones, decoder_attention_mask=ones)
    assert gap(masked, bare) < NOISE


@pytest.mark.slow
def test_it_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    model = swapped("BloomForCausalLM")
    expected = first(model, input_ids=IDS, position_ids=POSITIONS)
    run = torch.compile(model, backend="eager", fullgraph=True)
    assert gap(first(run, input_ids=IDS, position_ids=POSITIONS, use_cache=False), expected) < NOISE
    assert gap(first(run, input_ids=IDS, use_cache=False), first(model, input_ids=IDS)) < NOISE
    for _ in range(2):  # with gradients too
        found = run(input_ids=IDS, position_ids=POSITIONS, use_cache=False)[0]
        assert gap(found.detach(), expected) < NOISE


TASKS = (
    *("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"),
    *("QUESTION_ANSWERING", "NEXT_SENTENCE_PREDICTION", "PRETRAINING"),
)


def swallowing() -> list[str]:
    """Return every text class that belongs to a family, takes any argument, and no position ids by name."""
    maps = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS]
    names = {name for found in maps for name in found.values()}
    types = {kind for found in maps[:3] for kind in found}  # of the language models
    names |= {name for kind, name in modeling_auto.MODEL_MAPPING_NAMES.items() if kind in types and name != ""}
    names |= {"T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel"}
    return sorted(name for name in names if isinstance(name, str) and _swallows(name))


def _swallows(name: str) -> bool:
    try:
        cls = getattr(transformers, name)
        family = family_of(cls.config_class())
    except Exception:  # a class of another package, or whose config says too little
        return False
    taken = inspect.signature(cls.forward).parameters
    free = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    return free and "position_ids" not in taken and all(stack.image is None for stack in family.parts)


@pytest.mark.slow
def test_no_class_drops_them_without_a_word_after_a_swap() -> None:
    proved, unproved, silent = set[str](), dict[str, str](), list[str]()
    for name in swallowing():
        for scheme, site in (("rope", "attention"), ("alibi", "auto"), ("learned", "auto"), ("yarn", "auto")):
            try:
                said = _told(name, scheme, site)
            except PosswapError as error:  # it cannot be swapped so
                unproved.setdefault(name, str(error))
                continue
            except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:  # stock takes other inputs
                unproved[name] = repr(error)
                break
            proved.add(name)
            silent += [f"{name} {scheme} {argument}" for argument, heard in said.items() if not heard]
    assert silent == []
    known = {
        "Bloom",
        "Mpt",
        "RoFormer",
        "Falcon",
        "Bart",
        "T5",
        "M2M100",
        "Marian",
        "Mvp",
        "TrOCR",
        "LongT5",
        "Pegasus",
    }
    assert {prefix for prefix in known if any(name.startswith(prefix) for name in proved)} == known
    assert len(proved) >= 60, unproved


def _told(name: str, scheme: str, site: Any) -> dict[str, bool]:
    """Return, by argument, whether position ids changed what the swapped class says, or were refused."""
    model = tiny_model(getattr(transformers, name), meta=False)
    ids = IDS[:1].clone()
    ids[:, -1] = 2  # BART's classifier reads the last end-of-text token
    inputs = {"input_ids": ids}
    paired = model.config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(model.forward).parameters
    if paired:
        inputs["decoder_input_ids"] = ids
    if hasattr(model.config, "num_mel_bins"):
        shape = (1, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        inputs = {"input_features": torch.randn(shape), "decoder_input_ids": ids} if paired else inputs
    first(model, **inputs)  # an error of stock code is none of ours
    patch_model(model, scheme, site=site, **({"factor": 2.0} if scheme == "yarn" else {}))
    before, said = first(model, **inputs), {}
    for argument in ("position_ids", "decoder_position_ids") if paired else ("position_ids",):
        try:
            said[argument] = not torch.equal(first(model, **inputs, **{argument: POSITIONS}), before)
        except (UnsupportedSwapError, TypeError):
            said[argument] = True
    return said


def test_the_plan_says_what_becomes_of_them() -> None:
    plans = {
        name: swap_plan(patch_model(tiny_model(name), scheme))
        for name, scheme in (("bloom", "rope"), ("bart", "learned"))
    }
    for name, plan in plans.items():
        edits = [edit for edit in plan.edits if isinstance(edit, PassPositionIds)]
        assert {edit.before for edit in edits} == {"drops position ids"}
        assert {edit.after for edit in edits} == {"passed on" if name == "bloom" else "refused"}
    plan = swap_plan(patch_model(tiny_model("llama"), "alibi"))
    assert not any(isinstance(edit, PassPositionIds) for edit in plan.edits)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("BartForCausalLM", "learned"), ("FalconForTokenClassification", "yarn"), ("BloomModel", "rope")],
)
def test_what_is_loaded_does_the_same(name: str, scheme: str, tmp_path: Path) -> None:
    model = swapped(name, scheme, site="auto", **({"factor": 2.0} if scheme == "yarn" else {}))
    hf_posswap.save(model, tmp_path / "model")
    loaded = hf_posswap.load(tmp_path / "model")
    verify_swap(loaded)
    if model._posswap.plan.route == "plugin":
        expected = first(model, input_ids=IDS, position_ids=POSITIONS)
        assert gap(first(loaded, input_ids=IDS, position_ids=POSITIONS), expected) == 0
        return
    with pytest.raises(UnsupportedSwapError, match="so would stock transformers"):
        loaded(input_ids=IDS, position_ids=POSITIONS)
