"""Saved and loaded again, the model gives the same logits; stock classes load what is native and refuse the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import hf_posswap
from hf_posswap import unpatch_model, verify_swap
from hf_posswap.errors import AlreadyPatchedError, NotPatchedError, PositionRangeError
from hf_posswap.patching.record.record import native_config
from hf_posswap.testing.contract.checks import check, check_differs, check_finite, check_same, raises
from hf_posswap.testing.contract.models import LENGTH
from hf_posswap.testing.contract.pairs import Pair, words
from hf_posswap.testing.contract.point import once, point

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def ids_for(pair: Pair) -> torch.Tensor:
    """Return tokens beyond the original length, as far as the swapped model goes."""
    return words(2, min(LENGTH + 8, pair.plan.max_length))


def stock_auto(pair: Pair) -> Any:
    """Return the Auto class for the stock class of the pair."""
    if pair.tiny.paired:
        return transformers.AutoModelForSpeechSeq2Seq if pair.tiny.hears else transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM if pair.causal else transformers.AutoModelForMaskedLM


def trained_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that are trained."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@point(once)
def save_and_load_give_the_same_logits(pair: Pair, tmp_path: Path) -> None:
    """A model that is saved and loaded gives the same logits, and is known to be swapped."""
    model = pair.swapped()
    expected = pair.logits(model, ids_for(pair))
    model.save_pretrained(tmp_path)
    loaded = hf_posswap.load(tmp_path)
    check(type(loaded) is type(model), f"a {type(model).__name__}", type(loaded).__name__)
    check_same(pair.logits(loaded, ids_for(pair)), expected)
    record = json.loads(json.dumps(model.config.posswap))
    check(loaded.config.posswap == record, f"the record {record}", loaded.config.posswap)
    name = "max_position_embeddings"  # BLOOM's config says no length
    length, saved = getattr(loaded.config, name, None), getattr(model.config, name, None)
    check(length == saved, f"{name} {saved}", length)
    check(not loaded.training, "a model in eval mode", "training mode")
    verify_swap(loaded)
    with raises(AlreadyPatchedError):
        pair.patch(loaded)
    if pair.scheme == "blend":  # which holds the old mechanism too
        check_same(pair.logits(unpatch_model(loaded), ids_for(pair)), pair.logits(pair.native(), ids_for(pair)))
        return
    with raises(NotPatchedError, match="Load the base checkpoint"):
        unpatch_model(loaded)


@point()
def what_is_frozen_and_where_it_ends_survives_loading(pair: Pair, tmp_path: Path) -> None:
    """Loading keeps what is frozen, and where a position table ends."""
    model = pair.swapped()
    model.save_pretrained(tmp_path)
    loaded = hf_posswap.load(tmp_path)
    expected = trained_names(model) | pair.limits.thawed
    differ = sorted(trained_names(loaded) ^ expected)
    check(not differ, "the same parameters trained", f"otherwise {differ}")
    end = pair.plan.max_length
    ids = words(1, end + 1)
    if not pair.tabled:
        check_finite(pair.logits(loaded, ids))
    else:
        with raises(PositionRangeError, match=f"ends at {end}"):
            pair.logits(loaded, ids)


@point(once, few=True)
def a_second_round_trip_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    """A second round of saving and loading changes neither logits nor config."""
    model = pair.swapped()
    model.save_pretrained(tmp_path / "once")
    first = hf_posswap.load(tmp_path / "once")
    first.save_pretrained(tmp_path / "twice")
    second = hf_posswap.load(tmp_path / "twice")
    check_same(pair.logits(second, ids_for(pair)), pair.logits(model, ids_for(pair)))
    if pair.limits.settles_later:
        second.save_pretrained(tmp_path / "once")
    once_saved, twice_saved = ((tmp_path / which / "config.json").read_text() for which in ("once", "twice"))
    check(once_saved == twice_saved, f"the config.json of the first round, {once_saved}", twice_saved)


@point(once)
def stock_classes_load_native_checkpoints_and_refuse_the_others(pair: Pair, tmp_path: Path) -> None:
    """The stock class loads a native checkpoint, and refuses any other."""
    model = pair.swapped()
    model.save_pretrained(tmp_path)
    if pair.plan.route == "native":
        loaded = pair.tiny.stock.from_pretrained(tmp_path)
        check_same(pair.logits(loaded, ids_for(pair)), pair.logits(model, ids_for(pair)))
    else:
        model_type = json.loads((tmp_path / "config.json").read_text())["model_type"]
        check(model_type == "posswap", "the model type posswap", model_type)
        for options in ({}, {"ignore_mismatched_sizes": True}):  # the class itself ignores model_type
            with raises(ValueError, match="pip install hf-posswap"):
                pair.tiny.stock.from_pretrained(tmp_path, **options)
        with raises(RuntimeError, match="ignore_mismatched_sizes"):
            pair.tiny.stock.from_pretrained(tmp_path, config=native_config(model.config))


@point(lambda pair: pair.stack == "decoder" and pair.plan.route == "native")
def a_native_encoder_decoder_becomes_a_stock_one(pair: Pair) -> None:
    """To_native makes a stock encoder-decoder of one that is swapped natively, with the same logits."""
    stock = hf_posswap.to_native(pair.specimen())
    check(type(stock) is pair.tiny.stock, f"a {pair.tiny.stock.__name__}", type(stock).__name__)
    config = pair.tiny.stock.config_class
    check(type(stock.config) is config, f"a {config.__name__}", type(stock.config).__name__)
    check_same(pair.logits(stock, ids_for(pair)), pair.logits(pair.specimen(), ids_for(pair)))


@point(once)
def bfloat16_checkpoints_keep_their_precision(pair: Pair, tmp_path: Path) -> None:
    """A bfloat16 checkpoint keeps its precision, and loads in another one that is asked for."""
    model = pair.swapped().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = hf_posswap.load(tmp_path)
    upcast = hf_posswap.load(tmp_path, dtype=torch.float32)
    dtypes = {p.dtype for p in upcast.parameters()}
    check(dtypes == {torch.float32}, "parameters in float32", dtypes)
    if pair.limits.mixed_dtypes:
        pair.native().to(torch.bfloat16).save_pretrained(tmp_path / "native")
        for each in (loaded, pair.tiny.stock.from_pretrained(tmp_path / "native")):
            with raises(RuntimeError, match="same dtype"):
                pair.logits(each, words(1, 8))
        return
    expected = pair.logits(model, ids_for(pair))  # first: it takes angles of a swap's own back to float32
    if pair.limits.blurred:
        for (_, here), (_, there) in zip(loaded.named_buffers(), model.named_buffers(), strict=True):
            here.data = there.data
    added = pair.plan.added  # a scheme may keep what it learns in float32
    dtypes = {p.dtype for name, p in loaded.named_parameters() if name not in added}
    check(dtypes == {torch.bfloat16}, "parameters of the model in bfloat16", dtypes)
    check_same(pair.logits(loaded, ids_for(pair)), expected)


@point(once, lambda pair: pair.learns, parameter="dtype", values=(torch.float32, torch.bfloat16))
def what_a_scheme_learned_comes_back(pair: Pair, tmp_path: Path, dtype: torch.dtype) -> None:
    """What a scheme learned is saved and loaded."""
    model = pair.native().to(dtype)
    pair.patch(model)
    fresh = pair.logits(model, ids_for(pair))
    with torch.no_grad():  # as if trained: what a scheme begins with must not hide what is not loaded
        for name, parameter in model.named_parameters():
            if name in pair.plan.added:
                parameter.add_(torch.randn_like(parameter))
    expected = pair.logits(model, ids_for(pair))
    check_differs(expected, fresh, meaning="logits that what is learned changes")
    model.save_pretrained(tmp_path)
    for loaded in (hf_posswap.load(tmp_path), stock_auto(pair).from_pretrained(tmp_path)):
        check_same(pair.logits(loaded, ids_for(pair)), expected)
        learned = {name: p for name, p in loaded.named_parameters() if name in pair.plan.added}
        other = [name for name, p in learned.items() if not torch.equal(p, model.get_parameter(name))]
        check(not other, "the values that were saved", f"others in {other}")
        frozen = [name for name, p in learned.items() if not p.requires_grad]
        check(not frozen, "trainable parameters", f"frozen {frozen}")
