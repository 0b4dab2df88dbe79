"""Encoder-decoders with a table in each stack: found right, swapped in both stacks or in one, proved from outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

import hf_posswap
from hf_posswap import (
    Blend,
    Learned,
    NoPE,
    Rope,
    Sinusoidal,
    patch_model,
    patched,
    plan_swap,
    swap_plan,
    unpatch_model,
    verify_swap,
)
from hf_posswap.errors import (
    OptionError,
    PositionRangeError,
    RecordError,
    SchemeError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from hf_posswap.families import locate
from hf_posswap.families.modules import table_of
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.tools.scheme_values import finish_blend, set_blend, set_logit_scale
from tests.contract.pairs import CHANGE, NOISE, gap
from tests.families.oracles import penalty, rotated, without_tables
from tests.families.seq2seq import (
    COMPUTED,
    LENGTH,
    OPEN,
    PADDING,
    SOURCE,
    TABLES,
    TARGET,
    build,
    logits,
    stepwise,
    words,
)

MIXED: Any = {"encoder": "alibi", "decoder": "rope"}
SWAPS: dict[str, Any] = {
    "rope": "rope",
    "alibi": "alibi",
    "sinusoidal": "sinusoidal",
    "learned": "learned",
    "mixed": MIXED,
    "decoder nope": {"decoder": "nope"},
    "decoder learned": {"decoder": "learned"},
    "encoder rope": {"encoder": "rope"},
}
DAILY = ("BartForConditionalGeneration", "MarianMTModel", "M2M100ForConditionalGeneration")
"""One of each kind; the others run every swap with `-m exhaustive`."""
TABLED = ("sinusoidal", "learned", "decoder learned")
CELLS = [
    pytest.param(name, swap, marks=[] if name in DAILY else pytest.mark.exhaustive)
    for name in OPEN
    for swap in SWAPS
    if not (name in COMPUTED and swap in TABLED)
]
cells = pytest.mark.parametrize(("name", "swap"), CELLS)


def lengths(swap: str) -> tuple[Tensor, Tensor]:
    """Return a source and a target: longer than the original where the stack that reads it is swapped."""
    longer = LENGTH + 8
    return words(2, LENGTH if "decoder" in swap else longer), words(2, 9 if "encoder" in swap else longer, seed=3)


def swapped(name: str, swap: str, length: int = 2 * LENGTH) -> Any:
    model = build(name)
    patch_model(model, SWAPS[swap], max_length=length)
    return model


@pytest.mark.parametrize("name", OPEN)
def test_each_stack_is_found_with_its_own_shape(name: str) -> None:
    model = build(name)
    encoder, decoder = locate(model).stacks
    assert (encoder.name, decoder.name) == ("encoder", "decoder")
    assert (encoder.entry, decoder.entry) == ("model.encoder", "model.decoder")
    assert (encoder.geometry.num_heads, decoder.geometry.num_heads) == (4, 2)
    assert (encoder.geometry.num_kv_heads, decoder.geometry.num_kv_heads) == (4, 2)
    assert decoder.geometry.head_dim == 2 * encoder.geometry.head_dim == model.config.d_model // 2
    assert (encoder.geometry.causal, decoder.geometry.causal) == (False, True)
    for stack in (encoder, decoder):
        assert stack.geometry.original_length == LENGTH
        assert stack.table_offset == (TABLES | COMPUTED)[name]
        inner = ".self" if "BigBird" in name and stack is encoder else ""
        assert stack.attention == tuple(f"{stack.entry}.layers.{i}.self_attn{inner}" for i in range(2))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("name", OPEN)
def test_the_first_token_reads_the_row_that_the_offset_says(name: str, stack: str) -> None:
    model = build(name)
    where = locate(model).stack(stack)
    rows = table_of(model.get_submodule(where.table_path or ""))
    before = logits(model, SOURCE[:, :1], TARGET[:, :1])
    moved = []
    for row in range(6):
        kept = rows[row].clone()
        with torch.no_grad():
            rows[row] += 1
        if gap(logits(model, SOURCE[:, :1], TARGET[:, :1]), before) > 0:
            moved.append(row)
        with torch.no_grad():
            rows[row] = kept
    assert moved == [where.table_offset]


@cells
def test_the_swap_is_proved_and_taken_back_bit_by_bit(name: str, swap: str) -> None:
    model = build(name)
    before, config = logits(model), model.config.to_dict()
    tensors = {key: (id(t), t._version) for key, t in model.state_dict(keep_vars=True).items()}
    own = [(path, type(m), sorted(vars(m)), dict(m._forward_pre_hooks)) for path, m in model.named_modules()]
    with patched(model, SWAPS[swap], max_length=2 * LENGTH):
        verify_swap(model)
        kept = swap in ("learned", "decoder learned")
        assert (gap(logits(model), before) < NOISE) == kept
    assert {key: (id(t), t._version) for key, t in model.state_dict(keep_vars=True).items()} == tensors
    assert [(p, type(m), sorted(vars(m)), dict(m._forward_pre_hooks)) for p, m in model.named_modules()] == own
    assert model.config.to_dict() == config
    assert gap(logits(model), before) == 0


@cells
def test_cached_equals_full_beyond_the_original_length(name: str, swap: str) -> None:
    model = swapped(name, swap)
    source, target = lengths(swap)
    assert gap(stepwise(model, source, target), logits(model, source, target)) < NOISE


@cells
def test_beams_through_the_cache_find_what_full_forwards_find(name: str, swap: str) -> None:
    model = swapped(name, swap)
    found = [
        model.generate(SOURCE, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=cached, pad_token_id=PADDING)
        for cached in (True, False)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("swap", ["rope", "alibi", "mixed"])
def test_left_padding_moves_nothing_under_relative_schemes(name: str, swap: str) -> None:
    model = swapped(name, swap)
    source, mask = SOURCE.clone(), torch.ones_like(SOURCE)
    source[1, :6], mask[1, :6] = PADDING, 0
    found = logits(model, source, attention_mask=mask)
    assert gap(found[1], logits(model, SOURCE[1:, 6:], TARGET[1:])[0]) < NOISE
    target, decoder = TARGET.clone(), torch.ones_like(TARGET)
    target[1, :4], decoder[1, :4] = PADDING, 0
    found = logits(model, SOURCE, target, decoder_attention_mask=decoder)
    assert gap(found[1, 4:], logits(model, SOURCE[1:], TARGET[1:, 4:])[0]) < NOISE


@cells
def test_saved_and_loaded_it_is_the_same(name: str, swap: str, tmp_path: Path) -> None:
    model = swapped(name, swap)
    source, target = lengths(swap)
    expected, route = logits(model, source, target), model._posswap.plan.route
    hf_posswap.save(model, tmp_path / "model")
    loaded = hf_posswap.load(tmp_path / "model")
    assert type(loaded) is type(model)
    assert gap(logits(loaded, source, target), expected) == 0
    assert loaded.config.posswap == model.config.posswap
    verify_swap(loaded)
    stock = getattr(transformers, name)
    if route == "native":
        assert gap(logits(stock.from_pretrained(tmp_path / "model").eval(), source, target), expected) == 0
    else:
        with pytest.raises((RuntimeError, KeyError, ValueError, AttributeError)):
            stock.from_pretrained(tmp_path / "model")
        automatic = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
        assert gap(logits(automatic, source, target), expected) == 0
    hf_posswap.save(loaded, tmp_path / "again")
    assert gap(logits(hf_posswap.load(tmp_path / "again"), source, target), expected) == 0


def native(name: str, swapped_model: Any, length: int) -> Any:
    """Return a stock model of the class with the weights of `swapped_model`, its tables included."""
    model = build(name, max_position_embeddings=length)
    model.load_state_dict(swapped_model.state_dict(), strict=True)
    return model


@pytest.mark.parametrize("scheme", ["learned", "sinusoidal"])
@pytest.mark.parametrize("name", list(TABLES))
def test_tables_are_what_a_longer_stock_model_holds(name: str, scheme: str) -> None:
    model = build(name)
    patch_model(model, scheme, max_length=2 * LENGTH)
    assert model._posswap.plan.route == "native"
    source, target = words(2, 2 * LENGTH), words(2, 2 * LENGTH, seed=3)
    assert gap(logits(native(name, model, 2 * LENGTH), source, target), logits(model, source, target)) == 0


def test_marian_goes_on_as_a_longer_marian() -> None:
    """Marian's own class makes the longer table; the swap must find the same."""
    name = "MarianMTModel"
    longer, model = build(name, max_position_embeddings=3 * LENGTH), build(name)
    for one in (longer, model):
        for stack in (one.model.encoder, one.model.decoder):
            stack.embed_positions.weight = nn.Parameter(stack.embed_positions.create_weight(), requires_grad=False)
    others = {k: v for k, v in model.state_dict().items() if "embed_positions" not in k}
    longer.load_state_dict(others, strict=False)
    patch_model(model, Sinusoidal(layout="halves", scale=1.0), max_length=3 * LENGTH)
    source, target = words(2, 3 * LENGTH), words(2, 3 * LENGTH, seed=3)
    assert gap(logits(model, source, target), logits(longer, source, target)) < NOISE


@pytest.mark.parametrize("name", OPEN)
def test_rope_is_a_rotation_of_queries_and_keys_in_each_stack(name: str) -> None:
    oracle = without_tables(build(name))
    for stack in locate(oracle).stacks:
        of_encoder = "BigBird" in name and stack.name == "encoder"
        rotated(oracle, stack, ("query", "key") if of_encoder else ("q_proj", "k_proj"))
    assert gap(logits(swapped(name, "rope")), logits(oracle, use_cache=False)) < NOISE


@pytest.mark.parametrize("name", [name for name in OPEN if name.partition("For")[0] not in ("Mvp", "BigBirdPegasus")])
def test_alibi_is_an_additive_mask_in_each_stack(name: str) -> None:
    oracle = without_tables(build(name))
    batch = len(SOURCE)
    with torch.no_grad():
        both = penalty(4, SOURCE.shape[1], causal=False).expand(batch, -1, -1, -1)
        past = penalty(2, TARGET.shape[1], causal=True).expand(batch, -1, -1, -1)
        encoded = oracle.get_encoder()(input_ids=SOURCE, attention_mask=both)
        expected = oracle(
            encoder_outputs=encoded,
            attention_mask=torch.ones_like(SOURCE),
            decoder_input_ids=TARGET,
            decoder_attention_mask=past,
        ).logits
    assert gap(logits(swapped(name, "alibi")), expected) < NOISE


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "MarianMTModel", "M2M100ForConditionalGeneration"])
def test_a_stack_that_is_left_out_keeps_its_positions(name: str) -> None:
    model, oracle = build(name), build(name)
    patch_model(model, {"decoder": "rope"})
    decoder = locate(oracle).stack("decoder")
    with torch.no_grad():
        table_of(oracle.get_submodule(decoder.table_path or "")).zero_()
    rotated(oracle, decoder, ("q_proj", "k_proj"))
    assert gap(logits(model), logits(oracle, use_cache=False)) < NOISE
    assert "The encoder keeps its positions" in str(model._posswap.plan)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("name", list(TABLES))
def test_each_stack_says_where_its_table_ends(name: str, stack: str) -> None:
    model = build(name)
    patch_model(model, "learned", max_length=2 * LENGTH)
    long = words(1, 2 * LENGTH + 1)
    source, target = (long, TARGET[:1]) if stack == "encoder" else (SOURCE[:1], long)
    with pytest.raises(PositionRangeError, match=f"asked for {2 * LENGTH + 1} positions, .* ends at {2 * LENGTH}"):
        logits(model, source, target)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("swap", ["rope", "alibi", "learned"])
def test_gradient_checkpointing_gives_the_same_gradients(swap: str, reentrant: bool) -> None:
    model = swapped("BartForConditionalGeneration", swap).train()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=SOURCE, labels=TARGET, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    found = gradients()
    assert found.keys() == expected.keys()
    assert all(gap(found[name], grad) <= 1e-5 * (1 + float(grad.abs().max())) for name, grad in expected.items())


def test_copies_are_whole_and_come_back_alone() -> None:
    model = swapped("BartForConditionalGeneration", "mixed")
    expected, twin = logits(model), copy.deepcopy(model)
    unpatch_model(twin)
    assert gap(logits(twin), logits(build("BartForConditionalGeneration"))) == 0
    assert gap(logits(model), expected) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("stock_compiles")
@pytest.mark.parametrize("swap", ["rope", "alibi", "mixed"])
def test_it_compiles_whole_and_runs_on_a_static_cache(swap: str) -> None:
    model = swapped("BartForConditionalGeneration", swap)
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    assert gap(logits(compiled), logits(model)) < NOISE
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PADDING}
    static = model.generate(SOURCE, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static, model.generate(SOURCE, **options))


def test_an_encoder_decoder_is_explained_whole() -> None:
    config = build("BartForConditionalGeneration").config
    config.architectures = None
    found = hf_posswap.explain(config, "rope")
    assert found.report.model == "BartForConditionalGeneration"
    assert "in encoder and decoder" in found.report.native
    assert found.plan is not None
    assert list(found.plan.schemes) == ["encoder", "decoder"]


def test_the_logit_scale_of_one_stack_leaves_the_other_alone() -> None:
    model = build("BartForConditionalGeneration")
    patch_model(model, {"encoder": "alibi", "decoder": NoPE(logit_scale=0.0)})
    before = logits(model)
    set_logit_scale(model, 0.5)
    assert [scheme.name for scheme in model._posswap.plan.schemes.values()] == ["alibi", "nope"]
    assert model.config.posswap["stacks"]["decoder"]["logit_scale"] == 0.5
    assert gap(logits(model, SOURCE, words(2, LENGTH)), logits(model, SOURCE, words(2, LENGTH))) == 0
    verify_swap(model)
    assert gap(logits(model), before) < NOISE  # the scale begins past the original length


def test_sdpa_equals_eager() -> None:
    model = swapped("BartForConditionalGeneration", "mixed")
    expected = logits(model)
    model.set_attn_implementation("eager")
    assert gap(logits(model), expected) < NOISE


def test_a_decoder_cut_from_its_encoder_has_one_stack() -> None:
    model = build("BartForCausalLM")
    assert [stack.name for stack in locate(model).stacks] == ["decoder"]
    with torch.no_grad():
        before = model(SOURCE).logits
        patch_model(model, "nope")
        verify_swap(model)
        assert gap(model(SOURCE).logits, before) > CHANGE
        unpatch_model(model)
        assert gap(model(SOURCE).logits, before) == 0


def test_a_blend_moves_and_ends_in_both_stacks() -> None:
    name = "BartForConditionalGeneration"
    model, other = build(name), build(name)
    before = logits(model)
    patch_model(model, Blend(new=Rope()))
    assert gap(logits(model), before) < NOISE
    set_blend(model, 0.5)
    halfway = logits(model)
    assert min(gap(halfway, before), 1.0) > CHANGE
    set_blend(model, 1.0)
    finish_blend(model)
    patch_model(other, Rope())
    assert gap(logits(model), logits(other)) == 0
    assert model.config.posswap == other.config.posswap


@pytest.mark.parametrize("scheme", ["kerple", "t5", "fire"])
def test_what_each_stack_learns_comes_back(scheme: str, tmp_path: Path) -> None:
    model = build("BartForConditionalGeneration")
    plan = swap_plan(patch_model(model, scheme))
    learned = [name for name in plan.added if ".posswap." in name]
    assert {name.split(".")[1] for name in learned} == {"encoder", "decoder"}
    with torch.no_grad():
        for name in learned:
            model.get_parameter(name).add_(torch.randn_like(model.get_parameter(name)))
    hf_posswap.save(model, tmp_path / "model")
    assert gap(logits(hf_posswap.load(tmp_path / "model")), logits(model)) == 0


def planted() -> Any:
    model = build("BartForConditionalGeneration")
    model.model.encoder.position_table = nn.Embedding(4, 4)
    return model


BART = "BartForConditionalGeneration"
REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "causal only": (
        lambda: patch_model(build(BART), "nope"),
        UnsupportedSwapError,
        f'the encoder of {BART} sees both sides. What works: .*; or {{"decoder": "nope"}}, which leaves the encoder',
    ),
    "an unknown stack": (
        lambda: patch_model(build(BART), {"head": "rope"}),
        SchemeError,
        "schemes were given by stack, for head; this model has encoder, decoder",
    ),
    "stacks of a model of one": (
        lambda: patch_model(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=12, vocab_size=8)),
            {"decoder": "rope"},
        ),
        SchemeError,
        "for decoder; this model has one stack only, without a name",
    ),
    "a dict of a scheme without its name": (
        lambda: patch_model(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=12, vocab_size=8)), {"factor": 4.0}
        ),
        SchemeError,
        "a scheme's dict needs its name under 'name', .*, or under 'rope_type', .*; got {'factor': 4.0}",
    ),
    "such a dict for two stacks": (
        lambda: patch_model(build(BART), {"factor": 4.0}),
        SchemeError,
        "has encoder, decoder. A dict that is one scheme has its name under 'name'.",
    ),
    "options beside stacks": (
        lambda: patch_model(build(BART), MIXED, base=5.0),
        OptionError,
        r"options \['base'\] were given with schemes by stack: set them on the schemes",
    ),
    "a planted table": (
        lambda: patch_model(planted(), "rope"),
        UnsupportedModelError,
        "'model.encoder.position_table'",
    ),
    "a table where rows are computed": (
        lambda: patch_model(build("M2M100ForConditionalGeneration"), "learned"),
        UnsupportedSwapError,
        "learned needs a table in checkpoints, and M2M100ForConditionalGeneration computes its sinusoids",
    ),
    "a fading table where rows are computed": (
        lambda: patch_model(build("M2M100ForConditionalGeneration"), Blend(new=Rope())),
        UnsupportedSwapError,
        "computes its sinusoids, for any length",
    ),
    "attention to blocks": (
        lambda: patch_model(build("BigBirdPegasusForConditionalGeneration", attention_type="block_sparse"), "rope"),
        UnsupportedSwapError,
        r"inside .*'block_sparse': its code .*What works: .* attention_type='original_full'",
    ),
    "attention to prompts": (
        lambda: patch_model(build("MvpForConditionalGeneration", use_prompt=True), "rope"),
        UnsupportedSwapError,
        r"use_prompt=True: prompts precede .*What works: use_prompt=False",
    ),
    "an encoder alone": (
        lambda: locate(transformers.WhisperForAudioClassification(whisper_config())),
        UnsupportedModelError,
        "none of the stacks of family 'whisper' is there: 'decoder'",
    ),
    "a table that is shorter": (
        lambda: plan_swap(build(BART), {"encoder": Learned()}, max_length=8),
        SchemeError,
        r"max_length 8 is shorter than the model's \d+ positions; leave it out",
    ),
    "a record with a stack that is no scheme": (
        lambda: SwapRecord.from_dict({**record(), "stacks": {"encoder": 3}}),
        RecordError,
        "stacks must be an object with the schemes of encoder and decoder",
    ),
    "a record with another stack": (
        lambda: SwapRecord.from_dict({**record(), "stacks": {"middle": record()["scheme"]}}),
        RecordError,
        "stacks must be an object",
    ),
    "a record with an unknown scheme in a stack": (
        lambda: SwapRecord.from_dict({**record(), "stacks": {"encoder": {"name": "nothing"}}}),
        RecordError,
        "stacks.encoder holds a scheme that cannot be built",
    ),
}


def record() -> dict[str, Any]:
    return plan_swap(build(BART), "rope").record.to_dict()


def whisper_config() -> Any:
    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.WhisperConfig(**shape, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=97)


@pytest.mark.parametrize("what", list(REFUSALS))
def test_what_is_refused_and_how_it_is_said(what: str) -> None:
    attempt, error, message = REFUSALS[what]
    with pytest.raises(error, match=message):
        attempt()
