"""A training leaves its record in the checkpoint, and whatever tells of the model tells it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_posswap
from hf_posswap.checkpoints.card import CardFacts, write_card
from hf_posswap.checkpoints.manifest import write_listed_json
from hf_posswap.checkpoints.save import refuse_to_replace
from hf_posswap.errors import CheckpointError, ConfigError, DataError, UnsupportedSwapError
from hf_posswap.patching.record.training import TrainingRecord, training_of
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.adapting import run_recipe
from hf_posswap.training.data import build_data
from hf_posswap.training.engine import Finished
from hf_posswap.training.engine.checkpoints import base_identity
from tests.training.engine_runs import recipe, write_texts

SWAPS: dict[str, tuple[str, ...]] = {
    "plugin": ("swap.scheme=rope",),
    "native": ("swap.scheme=sinusoidal",),
    "control": ("swap.scheme=null", "swap.max_length=null"),
}
NAMED = {"control": "control", "plugin": "rope"}
STEPS, BATCH, LENGTH = 3, 4, 32


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def runs(place: Path) -> dict[str, Finished]:
    """Return a finished training of each kind."""
    return {
        kind: run_recipe(recipe(place, "name=my-recipe", f"training.max_steps={STEPS}", f"out={place / kind}", *how))
        for kind, how in SWAPS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", SWAPS)
def test_the_record_says_what_the_run_did(kind: str, place: Path, runs: dict[str, Finished]) -> None:
    held = json.loads((runs[kind].model / "config.json").read_text())["posswap_training"]
    assert held["tokens"] == STEPS * BATCH * LENGTH
    assert (held["steps"], held["recipe"], held["base"]) == (STEPS, "my-recipe", "gpt2")
    assert held["base_weights"] == base_identity(hf_posswap.load(place / "gpt2"))["weights of the base"]
    assert held["held_out"] == runs[kind].report["nll"]
    assert str(place) not in json.dumps(held)
    assert (held["swap"] is None) == (kind == "control")
    assert {run.report["training"]["data"] for run in runs.values()} == {held["data"]}
    assert runs[kind].report["training"] == held


@pytest.mark.slow
@pytest.mark.parametrize("kind", SWAPS)
def test_it_is_in_the_list_of_files_that_the_run_wrote(kind: str, runs: dict[str, Finished], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs[kind].model, tmp_path / "model"))
    refuse_to_replace(folder, overwrite=True)
    held = json.loads((folder / "config.json").read_text()) | {"mine": 1}
    (folder / "config.json").write_text(json.dumps(held))
    write_listed_json(folder / "config.json", held | {"ours": 2})
    with pytest.raises(CheckpointError, match=r"config.json \(changed since it was saved\)"):  # once edited, the user's
        refuse_to_replace(folder, overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SWAPS)
def test_it_survives_loading_and_saving_by_every_road(kind: str, runs: dict[str, Finished], tmp_path: Path) -> None:
    told = str(TrainingRecord(**runs[kind].report["training"]))
    once = hf_posswap.save(hf_posswap.load(runs[kind].model), tmp_path / "once")
    AutoModelForCausalLM.from_pretrained(once).save_pretrained(tmp_path / "twice")
    for folder in (runs[kind].model, once, tmp_path / "twice"):
        assert hf_posswap.explain(folder).report.trained == told
        loaded = hf_posswap.load(folder)
        assert hf_posswap.describe_positions(loaded).trained == told
        if kind != "control":
            assert hf_posswap.swap_plan(loaded).adaptation == f"adapted: {told}"
            assert "expect a high loss" not in str(hf_posswap.explain(folder))
            assert hf_posswap.explain(folder).plan == hf_posswap.swap_plan(loaded)


@pytest.mark.parametrize("kind", SWAPS)
def test_the_card_tells_it_and_asks_for_no_training(kind: str, runs: dict[str, Finished]) -> None:
    text = write_card(runs[kind].model, CardFacts("me/mine"), online=False)
    assert re.search(r"Trained: 384 tokens with recipe my-recipe, held-out loss \d\.\d{3} at 32 tokens\.", text)
    assert "high loss" not in text
    assert "Adaptation: required" not in text


def test_a_loss_that_is_told_is_the_models_own(place: Path, runs: dict[str, Finished]) -> None:
    """The documents that the data's own rule holds out, read by a stock model with its own loss."""
    data = build_data(recipe(place).data, byte_tokenizer(), causal=True, scheme_length=256)
    model = AutoModelForCausalLM.from_pretrained(runs["control"].model)
    rows = torch.from_numpy(np.stack([document[:LENGTH] for document in data.held_out]).astype(np.int64))
    with torch.no_grad():
        expected = float(model(input_ids=rows, labels=rows).loss)
    assert runs["control"].report["training"]["held_out"]["32"] == pytest.approx(expected, rel=1e-5)


def test_another_swap_is_not_taken_for_the_trained_one(runs: dict[str, Finished], tmp_path: Path) -> None:
    model = hf_posswap.patch_model(hf_posswap.load(runs["control"].model), "alibi")
    saved = hf_posswap.save(model, tmp_path / "alibi")
    explained = hf_posswap.explain(saved)
    assert explained.plan is not None
    assert explained.plan.adaptation.startswith("required: fine-tuning; until then expect a high loss")
    assert str(explained.report.trained).endswith("; before this swap")


def test_a_stock_copy_keeps_the_record(runs: dict[str, Finished], tmp_path: Path) -> None:
    native = hf_posswap.to_native(hf_posswap.load(runs["plugin"].model))
    saved = hf_posswap.save(native, tmp_path / "native")
    assert hf_posswap.explain(saved).report.trained == str(TrainingRecord(**runs["plugin"].report["training"]))


@pytest.mark.slow
def test_weights_of_a_recorded_training_are_those_of_one_without_it(place: Path, runs: dict[str, Finished]) -> None:
    again = run_recipe(recipe(place, f"training.max_steps={STEPS}", f"out={place / 'again'}", "swap.scheme=rope"))
    assert again.report["training"]["recipe"] is None  # a recipe that came from a mapping has no name
    one, other = (hf_posswap.load(run.model).state_dict() for run in (runs["plugin"], again))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": "many"}, r"config\.posswap_training: tokens must be a whole number, got 'many'"),
        ({"recipe": "a\nb"}, r"recipe must be a name of at most 128 letters, or null"),
        ({"recipe": "<script>"}, r"recipe must be a name"),
        ({"held_out": {"32": float("nan")}}, r"held_out must be an object of lengths in tokens to finite numbers"),
        ({"held_out": {"x": 1.0}}, r"held_out must be"),
        ({"version": 2}, r"version must be 1, got 2"),
        ({"base_weights": "x"}, r"base_weights must be 16 hexadecimal digits, or null"),
        ({"software": {"torch": 2}}, r"software must be an object of package names to versions"),
        ({"more": 1}, r"must hold exactly base, base_weights, data, .*update hf_posswap"),
    ],
)
def test_a_record_that_is_none_is_refused_by_name(
    changes: dict[str, Any], says: str, runs: dict[str, Finished]
) -> None:
    config = hf_posswap.load(runs["control"].model).config
    config.posswap_training = {**config.posswap_training, **changes}
    with pytest.raises(hf_posswap.errors.RecordError, match=says):
        training_of(config)


def test_a_record_of_an_older_version_is_read(runs: dict[str, Finished]) -> None:
    config = hf_posswap.load(runs["control"].model).config
    held = training_of(config)
    del config.posswap_training["software"]
    assert held is not None
    assert held.software["torch"] == torch.__version__
    assert training_of(config) == replace(held, software={})


def test_a_record_that_is_no_object_is_refused(runs: dict[str, Finished]) -> None:
    config = hf_posswap.load(runs["control"].model).config
    config.posswap_training = ["trained"]
    with pytest.raises(hf_posswap.errors.RecordError, match=r"config\.posswap_training must hold an object, got \["):
        training_of(config)


def test_results_and_their_page_tell_it(place: Path, runs: dict[str, Finished], tmp_path: Path) -> None:
    settings = hf_posswap.EvalSettings(lengths=(LENGTH,), metrics=("ppl_prefix", "short_reg"))
    chosen = [hf_posswap.Candidate(runs[kind].model, name=name) for kind, name in NAMED.items()]
    out = place / "results"
    found = hf_posswap.compare(chosen, documents=[place / "texts"], out=out, settings=settings, pictures=False)
    models = found.results["models"]
    assert models["control"]["trained"] == str(TrainingRecord(**runs["control"].report["training"]))
    page = (out / "report.html").read_text()
    assert f"no swap; {models['control']['trained']}" in page
    assert models["rope"]["plan"]["adaptation"] == f"adapted: {models['rope']['trained']}"
    assert "expect a high loss" not in page
    report = hf_posswap.push(runs["plugin"].model, "me/rope", dry_run=True, license="mit")
    assert report.card is not None
    assert f"The recipe on the card is that of {place / 'plugin' / 'report.json'}." in report.notes
    assert f"The results on the card are those of {out / 'results.json'}." in report.notes
    row = models["rope"]["ppl_prefix"][0]["perplexity"]
    assert f"| rope | {row:.3f} (" in report.card
    assert "| control |" in report.card
    change = models["rope"]["short_reg"]["loss"]
    conclusion = models["rope"]["conclusion"]
    assert f"{conclusion['text']} {conclusion['inside']}" in report.card
    assert f"({change['difference']:+.3f} nats per token, " in conclusion["inside"]
    assert '"name": "my-recipe"' in report.card
    assert str(place) not in report.card
    native = hf_posswap.push(runs["native"].model, "me/sinusoidal", dry_run=True, license="mit")
    assert f"The results on the card are those of {place / 'native' / 'report.json'}." in native.notes


@pytest.mark.slow
def test_a_push_says_where_a_stock_checkpoint_would_do(runs: dict[str, Finished], tmp_path: Path) -> None:
    folder = runs["plugin"].model
    report = hf_posswap.push(folder, "me/rope", dry_run=True, license="mit")
    expected = "A stock GPTNeoXForCausalLM computes the same, and needs no hf_posswap where it is loaded: posswap "
    assert [note for note in report.notes if note.startswith("A stock")] == [
        f"{expected}to-native {folder} -o OUT, then push OUT."
    ]
    assert type(hf_posswap.to_native(hf_posswap.load(folder))).__name__ == "GPTNeoXForCausalLM"
    in_memory = hf_posswap.push(hf_posswap.load(folder), "me/rope", dry_run=True, license="mit")
    assert any("push hf_posswap.to_native(model)" in note for note in in_memory.notes)
    stock = hf_posswap.push(runs["native"].model, "me/rope", dry_run=True, license="mit")
    alibi = hf_posswap.patch_model(hf_posswap.load(runs["control"].model), "alibi")
    refused = hf_posswap.push(alibi, "me/alibi", dry_run=True, license="mit")
    assert not [note for note in (*stock.notes, *refused.notes) if note.startswith("A stock")]


def test_what_is_beside_another_model_is_not_taken_for_its_own(runs: dict[str, Finished], tmp_path: Path) -> None:
    model = hf_posswap.save(hf_posswap.load(runs["plugin"].model), tmp_path / "run" / "other")
    (tmp_path / "run" / "report.json").write_text((runs["plugin"].folder / "report.json").read_text())
    report = hf_posswap.push(model, "me/rope", dry_run=True, license="mit")
    assert not [note for note in report.notes if "on the card" in note]
    assert report.card is not None
    assert "## Recipe" not in report.card
    (tmp_path / "run" / "report.json").write_text("{")
    assert hf_posswap.push(model, "me/rope", dry_run=True, license="mit").files == report.files


def test_what_is_given_wins_over_what_is_found(runs: dict[str, Finished]) -> None:
    given: dict[str, Any] = {"recipe": {"mine": 1}, "results": {"score": 0.5}, "base_model": "org/base"}
    report = hf_posswap.push(runs["plugin"].model, "me/rope", dry_run=True, license="mit", **given)
    assert report.card is not None
    assert '"mine": 1' in report.card
    assert "| score | 0.5 |" in report.card
    assert "my-recipe" not in report.card.partition("## Recipe")[2].partition("## Limits")[0]
    assert not [note for note in report.notes if "on the card" in note]


def test_texts_that_are_not_there_are_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    wanted = recipe(tmp_path, f"model.name={tmp_path / 'no-model'}", "data.sources=[{path: no-books/}]")
    with pytest.raises(hf_posswap.errors.DataError, match=r"no-books does not exist; give text files"):
        run_recipe(wanted)


def test_text_is_required_and_read_before_the_weights(tmp_path: Path) -> None:
    """The model here has a config and a tokenizer, and no weights: whoever reads them fails."""
    recipe(tmp_path)  # writes model and texts
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    (tmp_path / "one.txt").write_text("the only text")
    for settings, error, message in (
        (["data.sources=[]"], ConfigError, "there is no text to train on: give --text books"),
        ([f"data.sources.0.path={tmp_path / 'empty'}"], DataError, "empty holds no document"),
        ([f"data.sources.0.path={tmp_path / 'rows.jsonl'}"], DataError, "no text under 'text'"),
        ([f"data.sources.0.path={tmp_path / 'one.txt'}"], DataError, "has one text"),
        (["data.packing=pose", "data.length=128", "swap.max_length=9999"], DataError, "no window for packing 'pose'"),
        (["evaluation.lengths=[99999]"], DataError, "no held-out document has 99999 tokens"),
        (["swap.relative=drop"], UnsupportedSwapError, "relative"),
        ([], CheckpointError, "cannot load"),
    ):
        if "pose" in "".join(settings):
            settings = [*settings, f"data.sources.0.path={write_texts(tmp_path / 'short', words=3)}"]
        with pytest.raises(error, match=message):
            run_recipe(recipe(tmp_path, *settings, f"out={tmp_path / 'out'}"))


@pytest.mark.slow
def test_an_adapter_leaves_its_record_beside_it(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run = run_recipe(
        recipe(place, "name=lora", "peft.peft_type=LORA", "training.max_steps=2", f"out={tmp_path / 'lora'}")
    )
    told = str(TrainingRecord(**run.report["training"]))
    assert told.startswith("256 tokens with recipe lora, held-out loss ")
    loaded = hf_posswap.load(run.model)
    assert hf_posswap.swap_plan(loaded).adaptation == f"adapted: {told}"
    again = hf_posswap.save(loaded, tmp_path / "again")
    assert hf_posswap.swap_plan(hf_posswap.load(again)).adaptation == f"adapted: {told}"
    merged = hf_posswap.save(hf_posswap.load(again).merge_and_unload(), tmp_path / "merged")
    assert hf_posswap.explain(merged).report.trained == told
