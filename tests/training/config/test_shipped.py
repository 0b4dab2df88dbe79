"""The recipes that come with the package: found by name, included by name, and copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, GPT2Config, LlamaConfig

import hf_posswap
from hf_posswap import run_recipe
from hf_posswap.errors import ConfigError, DataError, UnknownNameError
from hf_posswap.patching.inspect.describe import explain
from hf_posswap.schemes import make_scheme
from hf_posswap.training.config import load_recipe, phases_of
from hf_posswap.training.config import shipped as module
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.reading import copy_recipe
from hf_posswap.training.config.shipped import find_recipe, recipes_folder, shipped_recipes
from hf_posswap.training.dryrun import dry_run
from tests.training.engine_runs import write_model, write_texts

ROOT = Path(__file__).resolve().parents[3]


def test_every_file_of_the_folder_is_known_by_its_name() -> None:
    found = (ROOT / "recipes").rglob("*.yaml")
    files = {path.relative_to(ROOT / "recipes").as_posix() for path in found if path.parent.name != "studies"}
    assert {f"{name}.yaml" for name in shipped_recipes()} == files
    assert recipes_folder() == ROOT / "recipes"


@pytest.mark.parametrize("name", [name for name, recipe in shipped_recipes().items() if recipe.trains])
def test_a_name_is_the_recipe_in_its_file_and_says_what_it_is_for_and_costs(name: str) -> None:
    divisors = ["swap.scheme={name: longrope, factor: 4}"] if name == "longrope" else []
    by_name, by_path = (load_recipe(given, divisors) for given in (name, ROOT / "recipes" / f"{name}.yaml"))
    assert by_name == by_path
    assert by_name.name == name
    header = shipped_recipes()[name].header
    assert list(header) == ["Purpose", "Swap", "Source", "Launch", "Cost", "Expected"]
    comment = "".join(line.lstrip("# ") for line in shipped_recipes()[name].text.splitlines() if line.startswith("#"))
    told = "".join(f"{part}:{text}" for part, text in header.items())
    assert "".join(told.split()) == "".join(comment.split())


@pytest.mark.parametrize("name", [name for name, recipe in shipped_recipes().items() if recipe.trains])
def test_the_line_on_the_swap_is_that_of_the_recipe(name: str) -> None:
    ones = "short_factor: [" + ", ".join(["1.0"] * 64) + "]"
    divisors = [f"swap.scheme={{name: longrope, factor: 8, {ones}, {ones.replace('short', 'long')}}}"]
    divisors = divisors if name == "longrope" else []
    recipe = load_recipe(name, divisors)
    old, _, tokens, loads_with = shipped_recipes()[name].swap
    read = sum(
        phase.recipe.training.max_steps
        * phase.recipe.training.per_device_train_batch_size
        * phase.recipe.training.gradient_accumulation_steps
        * phase.recipe.data.length
        for phase in phases_of(recipe)
    )
    assert tokens == f"{read / 1e6:.0f} M"
    encoder = recipe.objective.kind in ("masked", "embedding")
    shape: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 11, "bos_token_id": 0, "eos_token_id": 0}
    learned = BertConfig(**shape) if encoder else GPT2Config(**shape)
    bases = {"learned": [learned], "RoPE": [LlamaConfig(**shape)], "any": [learned, LlamaConfig(**shape)]}
    for config in bases[old]:
        for phase in phases_of(recipe):
            scheme, length = phase.recipe.swap.scheme, phase.recipe.swap.max_length
            plan = None if scheme is None else explain(config, make_scheme(scheme), max_length=length).plan
            assert scheme is None or plan is not None
            assert loads_with == ("stock" if plan is None or plan.route == "native" else "plugin")


MIXTURES = {
    "prolong-64k": ["data.length=64", "swap.max_length=256", "data.sources.0.min_tokens=64",
                    "data.sources.1.min_tokens=64"],
    "ultralong-1b": ["data.length=256", "swap.max_length=256", "swap.scheme.factor=4",
                     "swap.scheme.original_length=64", "data.sources.0.upsample={0: 0.5, 400: 1, 600: 4}"],
}  # fmt: skip
"""A mixture, and what makes it small."""


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_runs_dry_and_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "llama", "llama")
    names = [source.path for source in load_recipe(name).data.sources]
    for number, path in enumerate(names):
        write_texts(tmp_path / path, count=12, words=60 + 10 * number)
    small = [*MIXTURES[name], "model.name=llama", "training.max_steps=2", "training.warmup_steps=1",
             "training.gradient_accumulation_steps=2", "data.cache=cache", "data.held_out=0.2", "out=run",
             "training.report_to=none"]  # fmt: skip
    recipe = load_recipe(name, small)
    assert [source.path for source in recipe.data.sources] == names
    assert dry_run(recipe).predictions
    done = run_recipe(recipe)
    (phase,) = done.report["phases"]
    assert phase["tokens"] == 2 * 2 * recipe.data.length
    found = phase["data"]["sources"]
    assert [row["source"] for row in found] == names
    if name == "prolong-64k":
        assert sum(row["weight"] for row in found) == pytest.approx(1)
        assert phase["data"]["packing"] == "documents"
        assert ["documents_too_short" in row for row in found] == [True, True, *[False] * 8]
    else:
        assert found[0]["documents_read_again"] + found[0]["documents_not_read"] > 0
    rotation = hf_posswap.load(done.model).config.rope_parameters
    expected = {"prolong-64k": ("rope_theta", 8e6), "ultralong-1b": ("beta_fast", 4)}[name]
    assert rotation[expected[0]] == expected[1]
    with pytest.raises(DataError, match=rf"{names[0]}-elsewhere does not exist"):
        run_recipe(load_recipe(name, [*small, f"data.sources.0.path={names[0]}-elsewhere", "out=other"]))


def test_what_is_not_a_training_is_told_from_what_is() -> None:
    others = [name for name, recipe in shipped_recipes().items() if not recipe.trains]
    assert others[0] == "base"
    assert all(name.startswith("accelerate/") for name in others[1:])
    assert len(others) > 5


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("yran", UnknownNameError, r"unknown recipe 'yran'\. Did you mean 'yarn'\? Known: abf, "),
        ("nothing-like-it", UnknownNameError, r"unknown recipe 'nothing-like-it'\. Known: abf, .*, yarn\.$"),
        ("recipes/yarn.yaml", ConfigError, r"recipes/yarn\.yaml does not exist\. .*: give 'yarn'\."),
        ("mine.yaml", ConfigError, r"mine\.yaml cannot be read: No such file"),
        ("runs/mine", ConfigError, r"runs/mine cannot be read: No such file"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(
    given: str, error: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        load_recipe(given)


def test_a_run_folder_of_a_recipes_name_does_not_hide_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yarn").mkdir()
    assert find_recipe("yarn") == ROOT / "recipes" / "yarn.yaml"
    (tmp_path / "mine").write_text("model: {name: any}\nswap: {scheme: rope}")
    assert load_recipe("mine").model.name == "any"


def test_a_file_includes_a_recipe_of_the_package_by_name(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("include: yarn\nmodel: {name: any}\ntraining: {max_steps: 77}")
    expected = load_recipe("yarn", ["model.name=any", "training.max_steps=77", "name=mine"])
    assert load_recipe(mine) == expected
    mine.write_text("include: yran")
    with pytest.raises(ConfigError, match=r"mine\.yaml: include: unknown recipe 'yran'\. Did you mean 'yarn'\?"):
        load_recipe(mine)


def test_a_file_beside_is_included_before_a_recipe_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "yarn").write_text("training: {max_steps: 77}")
    (tmp_path / "mine.yaml").write_text("include: yarn\nmodel: {name: any}")
    assert load_recipe(tmp_path / "mine.yaml").training.max_steps == 77


@pytest.mark.parametrize("name", ["yarn", "control", "embedding", "base", "accelerate/ddp"])
def test_a_copy_runs_from_where_it_is(name: str, tmp_path: Path) -> None:
    written = copy_recipe(name, tmp_path / "new" / "place")
    assert [path.read_text() for path in written[:1]] == [shipped_recipes()[name].text]
    assert sorted(written) == sorted((tmp_path / "new" / "place").iterdir())
    if shipped_recipes()[name].trains:
        assert to_dict(load_recipe(written[0])) == to_dict(load_recipe(name))


def test_a_copy_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    written = copy_recipe("control", tmp_path / "mine.yaml")
    assert [path.name for path in written] == ["mine.yaml", "learned-to-rope.yaml", "base.yaml"]
    assert load_recipe(written[0], ["name=control"]) == load_recipe("control")
    with pytest.raises(ConfigError, match=r"base\.yaml: yarn includes a file of that name; give another name"):
        copy_recipe("yarn", tmp_path / "other" / "base.yaml")
    assert not (tmp_path / "other").exists()


def test_a_copy_replaces_nothing_and_writes_all_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("# mine\n")
    with pytest.raises(ConfigError, match=r"base\.yaml exists and is not overwritten: give another file or folder"):
        copy_recipe("yarn", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["base.yaml"]
    assert (tmp_path / "base.yaml").read_text() == "# mine\n"
    (tmp_path / "base.yaml").unlink()
    first, again = copy_recipe("yarn", tmp_path), copy_recipe("abf", tmp_path)
    assert first[1] == again[1]  # the same base, copied once
    first[0].write_text("# changed\n")
    with pytest.raises(ConfigError, match=r"yarn\.yaml exists and is not overwritten"):
        copy_recipe("yarn", tmp_path)
    assert first[0].read_text() == "# changed\n"


def test_an_installed_package_has_them_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(
        ROOT / "recipes", tmp_path / "shipped_recipes", ignore=shutil.ignore_patterns("*.py", "studies", "bench")
    )
    monkeypatch.setattr(module, "INSTALLED", tmp_path / "shipped_recipes")
    assert recipes_folder() == tmp_path / "shipped_recipes"
    assert load_recipe("yarn").swap.scheme == {"name": "yarn", "factor": 4}
    (tmp_path / "site" / "recipes").mkdir(parents=True)  # another package's, beside an installation without its data
    monkeypatch.setattr(module, "INSTALLED", tmp_path / "gone")
    monkeypatch.setattr(module, "CHECKOUT", tmp_path / "site" / "recipes")
    with pytest.raises(ConfigError, match=r"this installation of hf_posswap has no recipes in .*gone: install"):
        shipped_recipes()
