"""The commands to go on with: each can be typed as it stands once its folders of texts are there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_posswap.advice.candidates import Candidate
from hf_posswap.advice.case import Case
from hf_posswap.advice.serving import Serving
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.search.heads import find_projections
from hf_posswap.training.config.load import load_recipe

if TYPE_CHECKING:
    from hf_posswap.training.config.settings import Recipe

TEXTS, OTHER = "books/", "other-books/"
"""Folders of texts to train on and to measure on, by the names that the documentation has for them."""
_LEAST_STEPS, _WARMUP = 100, 0.05
_CUT = 8
_OPTIMIZER = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay")


def line(*words: str) -> str:
    """Return a command line of `posswap`, quoted for a shell.

    Example:
        >>> line("train", "data.sources=[{path: books/}]")
        "posswap train 'data.sources=[{path: books/}]'"
    """
    return shlex.join(("posswap", *words))


def untrained_commands(case: Case, candidate: Candidate, serving: Serving | None) -> tuple[str, ...]:
    """Return how to see, measure and save a scheme that nothing is trained for."""
    scheme, folder = candidate.scheme(case), f"{case.model.config.model_type}-{candidate.subject}"
    how = () if "factor=" in scheme else ("--max-length", str(case.length))
    return (
        line("explain", case.name, scheme, *how),
        compare_command(case, [f"+{scheme}"]),
        line("patch", case.name, scheme, *how, "-o", folder),
        *serve_commands(case, folder, serving),
    )


def compare_command(case: Case, others: Sequence[str], *, first: str | None = None) -> str:
    """Return the comparison of the base with `others`, the sliding window beside them, up to the wanted length."""
    shorter = [case.window * 2**k for k in range(12) if case.window * 2**k < case.length]
    lengths = ",".join(map(str, [*shorter, case.length]))
    return line("compare", first or case.name, *others, "--lengths", lengths, "--text", OTHER, "-o", "results")


def trained_commands(case: Case, candidate: Candidate, serving: Serving | None) -> tuple[str, ...]:
    """Return how to plan, train, compare at equal tokens, and serve what a recipe makes."""
    assert candidate.recipe is not None
    settings = recipe_settings(case, candidate)
    recipe, out = load_recipe(candidate.recipe, settings), candidate.recipe
    planned = [] if candidate.plan else [line("explain", case.name, *_planned(case, candidate))]
    return (
        *planned,
        line("train", candidate.recipe, *settings, f"out={out}"),
        line("train", "control", *control_settings(case, recipe), "out=control"),
        compare_command(case, ["control/model", f"{out}/model"], first=f"base={case.name}"),
        *serve_commands(case, f"{out}/model", serving),
    )


def _planned(case: Case, candidate: Candidate) -> tuple[str, ...]:
    scheme = candidate.scheme(case)
    return (scheme,) if "factor=" in scheme else (scheme, "--max-length", str(case.length))


def recipe_settings(case: Case, candidate: Candidate) -> list[str]:
    """Return KEY=VALUE for the recipe of `candidate`: the model, the length, and as many steps as the budget allows."""
    assert candidate.recipe is not None
    settings = [f"model.name={case.name}", f"data.sources=[{{path: {TEXTS}}}]", *candidate.swap(case)]
    settings.append(f"data.length={training_length(case, candidate)}")
    held = load_recipe(candidate.recipe, settings)
    if held.swap.fit and not can_be_fitted(case):
        settings.append("swap.fit=0")
    row = held.training.per_device_train_batch_size * held.data.length
    many = max(1, min(held.training.gradient_accumulation_steps, case.budget // (row * _LEAST_STEPS)))
    steps = max(2, case.budget // (row * many))
    warmup = min(int(held.training.warmup_steps), max(1, round(_WARMUP * steps)))
    more = {"gradient_accumulation_steps": many, "max_steps": steps, "warmup_steps": warmup}
    return [*settings, *(f"training.{k}={v}" for k, v in more.items() if v != getattr(held.training, k))]


def training_length(case: Case, candidate: Candidate) -> int:
    """Return the tokens of one training window: as many windows as the recipe is meant for, at most what is wanted."""
    most = case.length if candidate.windows is None else min(case.length, candidate.windows * case.window)
    return max(_CUT, most // _CUT * _CUT)


def trained_tokens(recipe: Recipe) -> int:
    """Return the tokens that `recipe` reads in one process."""
    training = recipe.training
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.max_steps
    return int(rows * recipe.data.length)


def control_settings(case: Case, recipe: Recipe) -> list[str]:
    """Return KEY=VALUE for the recipe `control`: as many tokens as `recipe` reads, without a swap."""
    length = min(case.window, recipe.data.length) // _CUT * _CUT or _CUT
    own = load_recipe("control", [f"model.name={case.name}", f"data.length={length}"])
    causal = recipe.objective.kind in ("next-token", "distill")
    settings = [f"model.name={case.name}", f"data.sources=[{{path: {TEXTS}}}]", f"data.length={length}"]
    settings += [] if causal else ["objective.kind=masked"]
    wanted = {} if recipe.objective.kind == "distill" else {name: getattr(recipe.training, name) for name in _OPTIMIZER}
    batch = own.training.per_device_train_batch_size
    steps = max(2, trained_tokens(recipe) // (batch * length))
    wanted |= {"max_steps": steps, "warmup_steps": min(int(recipe.training.warmup_steps), max(1, steps // 20))}
    said = {name: value for name, value in wanted.items() if value != getattr(own.training, name)}
    return [*settings, *(f"training.{name}={_plain(value)}" for name, value in said.items())]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_plain(one)}" for name, one in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def can_be_fitted(case: Case) -> bool:
    """Return whether the queries and keys of the model have biases in which a fitted start could lie."""
    geometry, paths = case.report.geometry, locate(case.model).main.attention
    if geometry.num_kv_heads != geometry.num_heads:
        return False
    try:
        for path in paths:
            find_projections(case.model.get_submodule(path), geometry.num_heads, geometry.head_dim)
    except UnsupportedSwapError:
        return False
    return True


def serve_commands(case: Case, folder: str, serving: Serving | None) -> tuple[str, ...]:
    """Return how to hand the model in `folder` to the program that is asked about; () where nothing helps."""
    if serving is None or case.serve is None or serving.verdict in ("impossible", "unknown"):
        return ()
    source, commands = folder, []
    if serving.converted:
        source = f"{folder.partition('/')[0]}-stock"
        commands.append(line("to-native", folder, "-o", source))
    return (*commands, line("export", source, "--target", case.serve))
