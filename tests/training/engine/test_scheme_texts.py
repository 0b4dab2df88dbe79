"""Trainings whose recipe writes its scheme as one text; the same scheme as a mapping is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.errors import ConfigError
from hf_posswap.training.adapting import run_recipe
from hf_posswap.training.config import load_recipe, phases_of
from hf_posswap.training.engine import Finished
from tests.training.engine_runs import assert_same_weights, write_model, write_texts

YARN = "yarn:factor=4,base=500000"
WHAT = {YARN: {"name": "yarn", "factor": 4, "base": 500000}, "rope:base=20000": {"name": "rope", "base": 20000}}
WINDOW = 64


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("texts")
    write_model(place / "llama", "llama")
    write_texts(place / "texts")
    return place


def recipe_file(place: Path, swap: str, *more: str) -> Path:
    """Write a recipe of two steps, with the section `swap` as it stands in YAML, and return its file."""
    path = place / "mine.yaml"
    lines = [
        f"model: {{name: {place / 'llama'}}}",
        f"swap: {{{swap}}}",
        f"data: {{length: 32, held_out: 0.3, cache: {place / 'cache'}, sources: [{{path: {place / 'texts'}}}]}}",
        "training: {max_steps: 2, warmup_steps: 1, per_device_train_batch_size: 2, report_to: none}",
        *more,
    ]
    path.write_text("\n".join(lines))
    return path


def same(run: Finished, scheme: dict[str, Any], length: int) -> bool:
    """Return whether a run swapped to `scheme` for `length` tokens, as its finished model says when it is loaded."""
    held = hf_posswap.load(run.model).config.posswap
    return held["scheme"].items() >= scheme.items() and held["max_length"] == length


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 200])  # a length that the factor reaches
def test_a_text_on_the_command_line_trains_as_the_mapping_does(place: Path, length: int | None) -> None:
    path, longer = recipe_file(place, "scheme: rope"), [] if length is None else [f"swap.max_length={length}"]
    written = [f"swap.scheme={YARN}"], [f"swap.scheme={json.dumps(WHAT[YARN])}"]
    one, other = (
        run_recipe(load_recipe(path, [*how, *longer, f"out={place / f'{number}-{length}'}"]))
        for number, how in enumerate(written)
    )
    assert_same_weights(one, other)
    assert same(one, WHAT[YARN], length or 4 * WINDOW)  # by itself yarn reaches its factor times the window
    assert one.report["phases"][0]["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 512])
def test_a_text_in_yaml_trains(place: Path, length: int | None) -> None:
    longer = "" if length is None else f", max_length: {length}"
    path = recipe_file(place, f'scheme: "rope:base=20000"{longer}')
    run = run_recipe(load_recipe(path, [f"out={place / f'yaml-{length}'}"]))
    assert same(run, WHAT["rope:base=20000"], length or WINDOW)


@pytest.mark.slow
def test_the_command_trains_it(place: Path) -> None:
    path, out = recipe_file(place, "scheme: rope"), place / "command"
    done = CliRunner().invoke(app, ["train", str(path), f"swap.scheme={YARN}", f"out={out}"])
    assert done.exit_code == 0, done.output
    assert "Swapped to yarn, for 256 tokens" in done.stdout
    assert hf_posswap.load(out / "model").config.rope_parameters["rope_theta"] == 500000


def test_fields_go_into_a_text_from_the_command_line_and_from_stages(place: Path) -> None:
    path = recipe_file(
        place,
        f'scheme: "{YARN}"',
        "stages: [{}, {scheme: {factor: 8}}, {scheme: rope:base=7}, {scheme: yarn:factor=9}]",
    )
    recipe = load_recipe(path, ["swap.scheme.beta_fast=16"])
    first = WHAT[YARN] | {"beta_fast": 16}
    assert recipe.swap.scheme == first
    assert [phase.recipe.swap.scheme for phase in phases_of(recipe)] == [
        first, first | {"factor": 8}, {"name": "rope", "base": 7}, first | {"factor": 9},
    ]  # fmt: skip


@pytest.mark.parametrize("order", [1, -1])
def test_a_scheme_and_its_fields_on_the_command_line_are_taken_in_any_order(place: Path, order: int) -> None:
    settings = ["swap.scheme=yarn", "swap.scheme.factor=16"][::order]
    assert load_recipe(recipe_file(place, "scheme: rope"), settings).swap.scheme == {"name": "yarn", "factor": 16}


BAD = {
    "yarn(factor=4)": r"swap\.scheme: 'yarn\(factor=4\)': .* write yarn:factor=4$",
    "yarn:factor:4": r"swap\.scheme: .* write yarn:factor=4$",
    "{yarn: {factor: 4}}": r"swap\.scheme: .* Did you mean 'yarn:factor=4'\?",
    "yarn:": r"swap\.scheme: .* Did you mean 'yarn'\?",
    "rope: base=3": r"swap\.scheme: .* Did you mean 'rope:base=3'\?",
    "yarn:faktor=4": r"swap\.scheme: scheme 'yarn' has no field 'faktor'. Did you mean 'factor'",
    "yarn:factor=four": r"swap\.scheme: yarn:factor=four: factor of 'yarn' must be a number or none, got 'four'",
    "yarn:factor=-1": r"swap\.scheme: yarn: factor must be",
    "yran:factor=4": r"swap\.scheme: unknown scheme 'yran'. Did you mean 'yarn'",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_text_is_told_before_any_model_is_looked_for(text: str) -> None:
    nowhere = {"model": {"name": "/nowhere/at all"}}
    with pytest.raises(ConfigError, match=BAD[text]):
        load_recipe(nowhere, [f"swap.scheme={text}"])


def test_a_text_cut_by_a_comma_in_braces_is_told_to_be_quoted(tmp_path: Path) -> None:
    path = tmp_path / "cut.yaml"
    path.write_text(f"model: {{name: nowhere}}\nswap: {{scheme: {YARN}}}")
    with pytest.raises(
        ConfigError, match=r"swap.base=500000: no such key. Inside braces a comma ends .* in quotes, \"yarn:"
    ):
        load_recipe(path)


def test_fields_below_a_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"swap.scheme is 'found.json', which has no keys"):
        load_recipe({"swap": {"scheme": "found.json"}}, ["swap.scheme.factor=4"])
