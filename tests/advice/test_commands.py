"""Every command of an advice is one that `posswap` takes: its parser, its recipe and its swap say so."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.cli.arguments import make_scheme
from hf_posswap.inspection.advice import weighing
from hf_posswap.inspection.advice.advise import Advice
from hf_posswap.inspection.advice.commands import trained_tokens
from hf_posswap.inspection.advice.figures import LITERATURE
from hf_posswap.training.config import Recipe, load_recipe

GROUP: Any = typer.main.get_command(app)
LENGTHS, BUDGETS, PROGRAMS = (128, 200, 512, 640), (None, 3e5, 5e7), (None, "vllm", "llamacpp", "transformers")
CASES = [
    *itertools.product(("gpt2", "llama", "bert"), LENGTHS, BUDGETS, (None,)),
    *itertools.product(("gpt2", "llama", "bert"), (512,), (5e7,), PROGRAMS[1:]),
]


def commands_of(advice: Advice) -> list[list[str]]:
    """Return the words of every command of every option, `posswap` left out."""
    lines = [command for option in (advice.use, *advice.others) for command in option.commands]
    words = [shlex.split(line) for line in lines]
    assert all(first == "posswap" for first, *_ in words)
    return [rest for _, *rest in words]


def parse(words: list[str]) -> dict[str, Any]:
    """Return what the command's own parser makes of its arguments; it raises what a user would be told."""
    command = GROUP.commands[words[0]]
    with command.make_context(words[0], list(words[1:])) as context:
        return dict(context.params)


def recipe_of(words: list[str]) -> Recipe:
    """Return the recipe of a `posswap train` line, with the setting that --text stands for."""
    given = parse(words)
    assert given["text"] == ["books/"]
    recipe, *settings = given["settings"]
    return load_recipe(recipe, [*settings, f"data.sources.0.path={given['text'][0]}"])


def test_the_parser_of_this_test_refuses_what_a_user_would_be_refused() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["train", "yarn", "--no-such-option"])


@pytest.mark.parametrize(("kind", "length", "budget", "serve"), CASES)
def test_commands_are_taken(place: Path, kind: str, length: int, budget: float | None, serve: str | None) -> None:
    model = str(place / kind)
    advice = hf_posswap.advise(model, length, budget=budget, serve=serve)
    assert advice.use.commands
    for words in commands_of(advice):
        given = parse(words)
        if words[0] == "train":
            check_training(model, words, advice)
        elif words[0] in ("explain", "patch") and given.get("scheme"):
            found = hf_posswap.explain(model, make_scheme(given["scheme"]), max_length=given["max_length"])
            assert found.refusal is None
            assert found.plan is not None
            assert found.plan.max_length >= length
        elif words[0] == "compare":
            assert [int(one) for one in given["lengths"].split(",")][-1] == length


def check_training(model: str, words: list[str], advice: Advice) -> None:
    """Check a `posswap train` line: its recipe is read, within the budget, and its swap is planned on the model."""
    recipe = recipe_of(words)
    assert recipe.model.name == model
    assert trained_tokens(recipe) <= max(advice.budget, 2 * trained_tokens(recipe) // recipe.training.max_steps)
    if recipe.swap.scheme is None:
        assert words[1] == "control"
        return
    scheme = recipe.swap.scheme
    if getattr(scheme, "ridge", None) is None:  # which needs the weights
        plan = hf_posswap.explain(model, scheme, max_length=recipe.swap.max_length).plan
        assert plan is not None
        assert plan.max_length >= advice.length


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_the_control_reads_as_many_tokens_as_the_recipe(place: Path, kind: str) -> None:
    advice = hf_posswap.advise(place / kind, 512, budget=5e7)
    trainings = [words for words in commands_of(advice) if words[0] == "train"]
    assert trainings
    for recipe, control in zip(trainings[::2], trainings[1::2], strict=True):
        assert control[1] == "control"
        first, second = (recipe_of(words) for words in (recipe, control))
        assert trained_tokens(second) == pytest.approx(trained_tokens(first), rel=0.01)
        assert second.data.length <= 64
        if first.objective.kind != "distill":
            assert second.training.learning_rate == first.training.learning_rate


def test_a_model_that_allows_no_fitted_start_begins_without(place: Path) -> None:
    from transformers import GPTNeoConfig

    config = GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]], hidden_size=32, num_heads=4, vocab_size=300,
                          max_position_embeddings=64)  # fmt: skip
    advice = hf_posswap.advise(config, 512, budget=5e7)  # its projections have no biases
    assert "swap.fit=0" in " ".join(advice.use.commands)
    trained = {option.recipe: " ".join(option.commands) for option in advice.others if option.recipe}
    for recipe in ("to-alibi", "learned-to-t5"):  # whose fit changes no projection
        assert "swap.fit=0" not in trained[recipe]
    with_biases = hf_posswap.advise(place / "gpt2", 512, budget=5e7)
    assert "swap.fit=0" not in " ".join(with_biases.use.commands)


@pytest.mark.slow
def test_an_advice_can_be_followed_to_its_end(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("books", "other-books"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    advice = hf_posswap.advise(place / "gpt2", 512, budget=6e4, serve="transformers")
    assert advice.use.recipe == "learned-to-rope"
    for command in advice.use.commands:
        words = shlex.split(command)[1:]
        words += ["--documents", "8", "--metrics", "ppl_prefix"] if words[0] == "compare" else []
        words += ["data.held_out=0.3"] if words[0] == "train" else []  # of 12 books
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, (command, done.output)
    assert hf_posswap.swap_plan(hf_posswap.load("learned-to-rope/model")).max_length == 512
    assert (tmp_path / "results" / "report.html").is_file()


@pytest.mark.parametrize(
    ("kind", "budget", "target", "programs", "command"),
    [
        ("llama", None, None, "vllm, sglang and transformers run the unswapped model", "vllm"),
        ("llama", None, "sglang", "sglang runs the unswapped model", "sglang"),
        ("llama", 5e7, "vllm", "trl, verl, axolotl and llamafactory train the unswapped model", "trl"),
        ("llama", None, "llamacpp", "", None),
        ("gpt2", 5e7, None, "", None),
    ],
)
def test_settings_that_replace_a_swapped_checkpoint_are_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, kind: str, budget: float | None, target: str | None, programs: str,
    command: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(weighing, "extrapolated_times", lambda case: 100.0)  # published results decide
    monkeypatch.setattr(weighing, "literature_of", lambda subject, *_, **__: LITERATURE[:1] * (subject == "yarn"))
    advice = hf_posswap.advise(str(place / kind), 512, budget=budget, target=target)
    assert advice.by_config.startswith(programs)
    lines = [words for words in commands_of(advice) if words[0] == "overrides"]
    assert [words[-1] for words in lines] == [command] * (command is not None)
    for words in lines:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert "max_position_embeddings" in done.stdout
        assert "512" in done.stdout
    assert ("settings alone" in " ".join(str(advice).split())) == bool(programs)
