"""Saved and loaded again in this process; tests/checkpoints/test_matrix.py does it in fresh ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_posswap
from hf_posswap import unpatch_model, verify_swap
from hf_posswap.errors import AlreadyPatchedError, NotPatchedError, PositionRangeError
from hf_posswap.patching.record.record import native_config
from tests.contract.models import LENGTH
from tests.contract.pairs import CHANGE, Pair, gap, once, words

SETTLES_LATER = ("mpt", "dbrx", "t5gemma", "t5gemma2")
"""Models whose own config writes more after it was read once: the dtype in the configs inside it."""
MIXED = ("deberta",)
"""Models whose own class, loaded in bfloat16, keeps some biases in float32, and cannot run."""

THAWED = {"whisper": {"model.encoder.embed_positions.weight"}}
"""Parameters that a model's own class freezes, and loads trainable."""

BLURRED = ("gemma3 (frequencies by layer type)", "modernbert (an encoder of two types of layers)")
"""Models of which some layers keep their own angles: their class blurs those in a cast, and makes them anew."""


def ids_for(pair: Pair) -> torch.Tensor:
    """Return tokens beyond the original length, as far as the swapped model goes."""
    return words(2, min(LENGTH + 8, pair.plan.max_length))


def stock_class(pair: Pair) -> Any:
    return pair.tiny.stock


def stock_auto(pair: Pair) -> Any:
    if pair.tiny.paired:
        return transformers.AutoModelForSpeechSeq2Seq if pair.tiny.hears else transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM if pair.causal else transformers.AutoModelForMaskedLM


@once
def test_save_and_load_give_the_same_logits(pair: Pair, tmp_path: Path) -> None:
    model = pair.swapped()
    expected = pair.logits(model, ids_for(pair))
    model.save_pretrained(tmp_path)
    loaded = hf_posswap.load(tmp_path)
    assert type(loaded) is type(model)
    assert gap(pair.logits(loaded, ids_for(pair)), expected) == 0
    assert loaded.config.posswap == json.loads(json.dumps(model.config.posswap))
    name = "max_position_embeddings"  # BLOOM's config says no length
    assert getattr(loaded.config, name, None) == getattr(model.config, name, None)
    assert not loaded.training
    verify_swap(loaded)
    with pytest.raises(AlreadyPatchedError):
        pair.patch(loaded)
    if pair.scheme == "blend":  # which holds the old mechanism too
        assert gap(pair.logits(unpatch_model(loaded), ids_for(pair)), pair.logits(pair.native(), ids_for(pair))) == 0
        return
    with pytest.raises(NotPatchedError, match="Load the base checkpoint"):
        unpatch_model(loaded)


def test_what_is_frozen_and_where_it_ends_survives_loading(pair: Pair, tmp_path: Path) -> None:
    model = pair.swapped()
    model.save_pretrained(tmp_path)
    loaded = hf_posswap.load(tmp_path)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained |= THAWED.get(pair.model, set())
    assert {name for name, parameter in loaded.named_parameters() if parameter.requires_grad} == trained
    end = pair.plan.max_length
    ids = words(1, end + 1)
    if not pair.tabled:
        assert torch.isfinite(pair.logits(loaded, ids)).all()
    else:
        with pytest.raises(PositionRangeError, match=f"ends at {end}"):
            pair.logits(loaded, ids)


@pytest.mark.few
@once
def test_a_second_round_trip_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    model = pair.swapped()
    model.save_pretrained(tmp_path / "once")
    once = hf_posswap.load(tmp_path / "once")
    once.save_pretrained(tmp_path / "twice")
    twice = hf_posswap.load(tmp_path / "twice")
    assert gap(pair.logits(twice, ids_for(pair)), pair.logits(model, ids_for(pair))) == 0
    if pair.model in SETTLES_LATER:
        twice.save_pretrained(tmp_path / "once")
    files = [tmp_path / which / "config.json" for which in ("once", "twice")]
    assert files[0].read_text() == files[1].read_text()


@once
def test_stock_classes_load_native_checkpoints_and_refuse_the_others(pair: Pair, tmp_path: Path) -> None:
    model = pair.swapped()
    model.save_pretrained(tmp_path)
    if pair.plan.route == "native":
        loaded = stock_class(pair).from_pretrained(tmp_path)
        assert gap(pair.logits(loaded, ids_for(pair)), pair.logits(model, ids_for(pair))) == 0
    else:
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "posswap"
        for options in ({}, {"ignore_mismatched_sizes": True}):  # the class itself ignores model_type
            with pytest.raises(ValueError, match="pip install hf-posswap"):
                stock_class(pair).from_pretrained(tmp_path, **options)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            stock_class(pair).from_pretrained(tmp_path, config=native_config(model.config))


@pytest.mark.pairs(lambda pair: pair.stack == "decoder" and pair.plan.route == "native")
def test_a_native_encoder_decoder_becomes_a_stock_one(pair: Pair) -> None:
    stock = hf_posswap.to_native(pair.specimen())
    assert type(stock) is pair.tiny.stock
    assert type(stock.config) is pair.tiny.stock.config_class
    assert gap(pair.logits(stock, ids_for(pair)), pair.logits(pair.specimen(), ids_for(pair))) == 0


@once
def test_bfloat16_checkpoints_keep_their_precision(pair: Pair, tmp_path: Path) -> None:
    model = pair.swapped().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = hf_posswap.load(tmp_path)
    upcast = hf_posswap.load(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in upcast.parameters()} == {torch.float32}
    if pair.model in MIXED:
        pair.native().to(torch.bfloat16).save_pretrained(tmp_path / "native")
        for each in (loaded, pair.tiny.stock.from_pretrained(tmp_path / "native")):
            with pytest.raises(RuntimeError, match="same dtype"):
                pair.logits(each, words(1, 8))
        return
    expected = pair.logits(model, ids_for(pair))  # first: it takes angles of a swap's own back to float32
    if pair.model in BLURRED:
        for (_, here), (_, there) in zip(loaded.named_buffers(), model.named_buffers(), strict=True):
            here.data = there.data
    own = pair.plan.added  # a scheme may keep what it learns in float32
    assert {p.dtype for name, p in loaded.named_parameters() if name not in own} == {torch.bfloat16}
    assert gap(pair.logits(loaded, ids_for(pair)), expected) == 0


@once
@pytest.mark.pairs(lambda pair: pair.learns)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_scheme_learned_comes_back(pair: Pair, tmp_path: Path, dtype: torch.dtype) -> None:
    model = pair.native().to(dtype)
    pair.patch(model)
    fresh = pair.logits(model, ids_for(pair))
    with torch.no_grad():  # as if trained: what a scheme begins with must not hide what is not loaded
        for name, parameter in model.named_parameters():
            if name in pair.plan.added:
                parameter.add_(torch.randn_like(parameter))
    expected = pair.logits(model, ids_for(pair))
    assert gap(expected, fresh) > CHANGE
    model.save_pretrained(tmp_path)
    for loaded in (hf_posswap.load(tmp_path), stock_auto(pair).from_pretrained(tmp_path)):
        assert gap(pair.logits(loaded, ids_for(pair)), expected) == 0
        learned = {name: p for name, p in loaded.named_parameters() if name in pair.plan.added}
        assert all(torch.equal(p, model.get_parameter(name)) for name, p in learned.items())
        assert all(p.requires_grad for p in learned.values())
