"""The studies: what they shrink and hold equal, what they find again, and both scripts from end to end."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.errors import CheckpointError, ConfigError, TrainingError
from hf_posswap.training.config import load_recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.utils.atomic_io import read_json
from recipes.studies import effects
from recipes.studies.rows import REACH, ROWS, SMOKE, Row, Sizes, row_settings
from recipes.studies.running import CONTROL, RECIPES, control_settings, make_run, run_script, swapped, tokens_of
from recipes.studies.tables import markdown
from tests.training.engine_runs import write_model, write_texts

BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps")
SHRUNK = {"model", "data.length", "swap.max_length", "swap.gradual_steps", "stages", "training.gradient_checkpointing"}
SHRUNK |= {"training.max_steps", "training.per_device_train_batch_size", "training.gradient_accumulation_steps"}
SHRUNK |= {"training.warmup_steps", "training.learning_rate"}


def scheme_of(row: Row, folder: Path) -> Path | None:
    """Return a file with divisors where the recipe asks for one."""
    if not row.searched:
        return None
    path = folder / "longrope.json"
    path.write_text(json.dumps({"name": "longrope", "factor": 8.0, "long_factor": [1.0] * 16}))
    return path


def flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return found


def test_every_recipe_has_a_row() -> None:
    launchers = {"base", "control"}
    too_long = {"prolong-64k", "ultralong-1b", "restore"}  # mixtures of billions of tokens; adapters of a large model
    names = {path.stem for path in RECIPES.glob("*.yaml")} - launchers - too_long
    assert {row.name for row in ROWS} == names


@pytest.mark.parametrize("sizes", [Sizes(), SMOKE], ids=["real", "smoke"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_recipe_is_shrunk_and_nothing_else(row: Row, sizes: Sizes, tmp_path: Path) -> None:
    scheme = scheme_of(row, tmp_path)
    own = flat(to_dict(load_recipe(row.config, [f"swap.scheme={scheme}"] if scheme else [])))
    recipe = load_recipe(row.config, row_settings(row, sizes, tmp_path, scheme))
    changed = {key for key, value in flat(to_dict(recipe)).items() if own.get(key) != value}
    assert changed <= {*SHRUNK, "model.name", "data.sources"}
    assert [source.path for source in recipe.data.sources] == ["python"]  # no recipe has a text of its own
    assert tokens_of(recipe) == sizes.steps * sizes.step
    assert recipe.data.length <= REACH * sizes.window


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_control_reads_the_same_tokens_with_the_same_optimizer_and_no_swap(row: Row, tmp_path: Path) -> None:
    sizes = Sizes()
    settings = row_settings(row, sizes, tmp_path, scheme_of(row, tmp_path))
    recipe = load_recipe(row.config, settings)
    control = load_recipe(CONTROL, control_settings(recipe, settings, sizes.window))
    assert control.swap.scheme is None
    assert (control.data.length, control.data.cut) == (sizes.window, (1,))
    assert tokens_of(control) == tokens_of(recipe)
    held, wanted = flat(to_dict(control)), flat(to_dict(recipe))
    own = {"per_device_train_batch_size", "gradient_accumulation_steps"} | ({"max_steps"} if recipe.stages else set())
    own |= {"gradient_checkpointing"}
    for key in (key for key in wanted if key.startswith("training.") and key.split(".")[1] not in own):
        assert held[key] == wanted[key], key
    assert (held["model.name"], held["data.sources"]) == (wanted["model.name"], wanted["data.sources"])
    assert control.objective.kind == ("masked" if row.base == "bert" else "next-token")


def test_windows_that_do_not_fit_the_control_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe(
        RECIPES / "yarn.yaml",
        ["data.length=100", *(f"training.{name}=1" for name in BATCHES)],
    )
    with pytest.raises(
        ConfigError, match="a step of 100 tokens is not a multiple of windows of 64: change data.length"
    ):
        control_settings(recipe, [], 64)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny GPT-2 of learned positions, and texts to train and to measure on."""
    folder = tmp_path_factory.mktemp("studies")
    write_model(folder / "gpt2")
    write_texts(folder / "train", count=12)
    write_texts(folder / "valid", count=9)
    return folder


def tiny_settings(place: Path, *more: str) -> list[str]:
    return [
        f"model.name={place / 'gpt2'}", f"data.sources=[{{path: {place / 'train'}}}]", "data.length=64",
        f"data.cache={place / 'cache'}", "training.max_steps=2", "training.per_device_train_batch_size=2",
        "training.warmup_steps=1", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_fitted_recipe_begins_where_its_fit_left_it(place: Path) -> None:
    """Held against the fit by hand, on the windows that the recipe fits to."""
    run = make_run(RECIPES / "learned-to-rope.yaml", tiny_settings(place, "swap.max_length=64"), place)
    run.finish()
    trained = hf_posswap.load(run.model).eval()
    start = swapped(hf_posswap.load(place / "gpt2").eval(), run, trained)
    told = read_json(run.folder / "report.json")
    ids = torch.arange(60)[None]
    with torch.no_grad():
        before, after = start(ids).logits, trained(ids).logits
    unfitted = hf_posswap.load(place / "gpt2").eval()
    hf_posswap.centre_table(unfitted)
    hf_posswap.patch_model(unfitted, trained.config.posswap["scheme"], max_length=64)
    with torch.no_grad():
        plain = unfitted(ids).logits
    assert told["phases"][0]["steps"] == 2
    assert (before - after).abs().max() > 1e-4, "the recipe was trained"
    assert (before - plain).abs().max() > 1e-4, "its start was fitted"


def test_a_run_is_named_after_what_has_a_part_in_it(place: Path) -> None:
    config = RECIPES / "learned-to-rope.yaml"
    first = make_run(config, tiny_settings(place), place)
    assert first.folder == make_run(config, tiny_settings(place, "training.logging_steps=1"), place).folder
    assert first.folder != make_run(config, tiny_settings(place, "training.max_steps=3"), place).folder
    command = first.command({place: "$WORK"})
    assert command.startswith("python recipes/train.py --config recipes/learned-to-rope.yaml model.name=$WORK/gpt2 ")
    assert str(place) not in command
    assert str(RECIPES) not in command


def test_a_finished_run_is_found_and_another_base_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "gpt2", tmp_path / "gpt2")
    settings = tiny_settings(place, f"model.name={tmp_path / 'gpt2'}")
    run = make_run(RECIPES / "learned-to-rope.yaml", settings, tmp_path)
    report = run.finish()
    assert run.tokens_read == 2 * 2 * 64
    written = (run.folder / "report.json").stat().st_mtime_ns
    assert run.finish() == report
    assert (run.folder / "report.json").stat().st_mtime_ns == written
    write_model(tmp_path / "other", n_layer=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "gpt2" / "model.safetensors")
    with pytest.raises(CheckpointError, match="was trained with other weights of the base: delete it, or"):
        run.finish()


def test_a_script_that_fails_stops_the_study(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match="recipes/train.py ended with exit code 2; it says why above. Its argum"):
        run_script(RECIPES / "train.py", ["--config", str(RECIPES / "base.yaml")])
    assert "give a folder or a Hub id" in capfd.readouterr().err


def test_an_unknown_recipe_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(effects.app, ["--out", str(tmp_path), "--only", "yarm"])
    assert done.exit_code == 2
    assert "Did you mean 'yarn'?" in done.stderr


@pytest.mark.exhaustive  # two minutes, and the recipes themselves run in every run
@pytest.mark.timeout(900)
def test_the_effects_study_runs_every_recipe(tmp_path: Path) -> None:
    """Some rows, then all: what was there stays, and the second call trains only what is missing."""
    arguments = ["--smoke", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(effects.app, [*arguments, "--only", "yarn,learned-to-rope"])
    assert done.exit_code == 0, done.output + repr(done.exception)
    some = read_json(tmp_path / "out" / "effects.json")
    assert [row["recipe"] for row in some["rows"]] == ["learned-to-rope", "yarn"]
    done = CliRunner().invoke(effects.app, arguments)
    assert done.exit_code == 0, done.output + repr(done.exception)
    found = read_json(tmp_path / "out" / "effects.json")
    assert [row["recipe"] for row in found["rows"]] == [row.name for row in ROWS]
    assert [row for row in found["rows"] if row["recipe"] in ("learned-to-rope", "yarn")] == some["rows"]
    assert str(tmp_path) not in json.dumps(found)
    said = (tmp_path / "out" / "effects.md").read_text()
    for row in found["rows"]:
        assert row["control_tokens"] == row["tokens"] or row["recipe"] == "staged"
        assert f"| {row['recipe']}" in said
        assert row["commands"]["recipe"] in said


def test_the_committed_table_is_of_every_recipe_and_says_what_its_json_does() -> None:
    folder = RECIPES / "studies" / "results"
    found = read_json(folder / "effects.json")
    assert [row["recipe"] for row in found["rows"]] == [row.name for row in ROWS]
    assert found["sizes"] == json.loads(json.dumps(dataclasses.asdict(Sizes())))
    assert (folder / "effects.md").read_text() == markdown(found)


def test_rows_of_other_sizes_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "effects.json"
    for number, row in enumerate(("yarn", "abf", "yarn"), 1):
        path.write_text(json.dumps(effects._with_row(path, SMOKE, {"recipe": row, "number": number})))
    assert read_json(path)["rows"] == [{"recipe": "abf", "number": 2}, {"recipe": "yarn", "number": 3}]
    assert effects._with_row(path, Sizes(), {"recipe": "pose"})["rows"] == [{"recipe": "pose"}]
