"""The next commands, which can be copied as printed once their folders of texts exist."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hf_posswap.errors import SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.inspection.advice.candidates import Candidate
from hf_posswap.inspection.advice.case import Case, Serving
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.config.load import load_recipe

if TYPE_CHECKING:
    from hf_posswap.training.config.settings import Recipe

TEXTS, OTHER = "books/", "other-books/"
"""Folders of texts to train on and to measure on, named as in the documentation."""
_SOURCE = f"data.sources.0.path={TEXTS}"
"""The setting for which `posswap train` has the option --text."""
_LEAST_STEPS, _WARMUP = 100, 0.05
_CUT = 8
_OPTIMIZER = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay")


def line(*arguments: str) -> str:
    """Return a command line of `posswap`, quoted for a shell.

    Example:
        >>> line("train", "swap.scheme={name: yarn}")
        "posswap train 'swap.scheme={name: yarn}'"
    """
    return shlex.join(("posswap", *arguments))


def train_line(recipe: str, settings: Sequence[str]) -> str:
    """Return a command line of `posswap train`, with the text as its option.

    Example:
        >>> train_line("yarn", ["model.name=llama", "data.sources.0.path=books/", "out=yarn"])
        'posswap train yarn model.name=llama --text books/ out=yarn'
    """
    words = [word for each in settings for word in (("--text", TEXTS) if each == _SOURCE else (each,))]
    return line("train", recipe, *words)


def untrained_commands(case: Case, candidate: Candidate, serving: Serving | None) -> tuple[str, ...]:
    """Return the commands to explain, measure and save a scheme without training."""
    scheme, folder = candidate.scheme(case), f"{case.model.config.model_type}-{candidate.subject}"
    how = () if "factor=" in scheme else ("--max-length", str(case.length))
    return (
        line("explain", case.name, scheme, *how),
        compare_command(case, [f"+{scheme}"]),
        line("patch", case.name, scheme, *how, "-o", folder),
        *serve_commands(case, folder, serving),
    )


def compare_command(case: Case, others: Sequence[str], *, first: str | None = None) -> str:
    """Return the comparison of the base with `others` and the sliding window, up to the target length."""
    shorter = [case.window * 2**k for k in range(12) if case.window * 2**k < case.length]
    lengths = ",".join(map(str, [*shorter, case.length]))
    return line("compare", first or case.name, *others, "--lengths", lengths, "--text", OTHER, "-o", "results")


def trained_commands(case: Case, candidate: Candidate, serving: Serving | None) -> tuple[str, ...]:
    """Return the commands to plan, train, compare at equal tokens, and serve a recipe's model."""
    assert candidate.recipe is not None
    settings = recipe_settings(case, candidate)
    recipe, out = load_recipe(candidate.recipe, settings), candidate.recipe
    planned: list[str] = []
    if not candidate.plan:
        scheme = candidate.scheme(case)
        length = () if "factor=" in scheme else ("--max-length", str(case.length))
        planned = [line("explain", case.name, scheme, *length)]
    return (
        *planned,
        train_line(candidate.recipe, [*settings, f"out={out}"]),
        train_line("control", [*control_settings(case, recipe), "out=control"]),
        compare_command(case, ["control/model", f"{out}/model"], first=f"base={case.name}"),
        *serve_commands(case, f"{out}/model", serving),
    )


def recipe_settings(case: Case, candidate: Candidate) -> list[str]:
    """Return KEY=VALUE for the recipe of `candidate`: the model, the length, and as many steps as the budget allows."""
    assert candidate.recipe is not None
    settings = [f"model.name={case.name}", _SOURCE, *candidate.swap(case)]
    # one training window is the recipe's number of windows, at most the target length
    most = case.length if candidate.windows is None else min(case.length, candidate.windows * case.window)
    settings.append(f"data.length={max(_CUT, most // _CUT * _CUT)}")
    recipe = load_recipe(candidate.recipe, settings)
    if recipe.swap.fit and not can_be_fitted(case, recipe):
        settings.append("swap.fit=0")
    row = recipe.training.per_device_train_batch_size * recipe.data.length
    accumulation = max(1, min(recipe.training.gradient_accumulation_steps, case.budget // (row * _LEAST_STEPS)))
    steps = max(2, case.budget // (row * accumulation))
    warmup = min(int(recipe.training.warmup_steps), max(1, round(_WARMUP * steps)))
    more = {"gradient_accumulation_steps": accumulation, "max_steps": steps, "warmup_steps": warmup}
    return [*settings, *(f"training.{k}={v}" for k, v in more.items() if v != getattr(recipe.training, k))]


def trained_tokens(recipe: Recipe) -> int:
    """Return the number of tokens that `recipe` trains on in one process."""
    training = recipe.training
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.max_steps
    return int(rows * recipe.data.length)


def control_settings(case: Case, recipe: Recipe) -> list[str]:
    """Return KEY=VALUE for the recipe `control`, which trains on as many tokens as `recipe` without a swap."""
    length = min(case.window, recipe.data.length) // _CUT * _CUT or _CUT
    control = load_recipe("control", [f"model.name={case.name}", f"data.length={length}"])
    causal = recipe.objective.predicts_next_token
    settings = [f"model.name={case.name}", _SOURCE, f"data.length={length}"]
    settings += [] if causal else ["objective.kind=masked"]
    values = {} if recipe.objective.kind == "distill" else {name: getattr(recipe.training, name) for name in _OPTIMIZER}
    batch = control.training.per_device_train_batch_size
    steps = max(2, trained_tokens(recipe) // (batch * length))
    values |= {"max_steps": steps, "warmup_steps": min(int(recipe.training.warmup_steps), max(1, steps // 20))}
    overrides = {name: value for name, value in values.items() if value != getattr(control.training, name)}
    return [*settings, *(f"training.{name}={_plain(value)}" for name, value in overrides.items())]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_plain(item)}" for name, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def can_be_fitted(case: Case, recipe: Recipe) -> bool:
    """Return whether the swap of `recipe` can be fitted to the model's positions, as the training checks it."""
    from hf_posswap.training.engine.preparing import chosen_scheme
    from hf_posswap.training.search import check_fit

    scheme = chosen_scheme(recipe)
    if scheme is None:
        return False
    model = case.fresh()
    if recipe.model.dtype != "auto":
        model.to(getattr(torch, recipe.model.dtype))
    try:
        plan = plan_swap(model, scheme, max_length=recipe.swap.max_length)
        check_fit(model, plan.scheme if isinstance(scheme, RotaryScheme) else scheme)
    except (UnsupportedSwapError, UnsupportedModelError, SchemeError):
        return False
    return True


def serve_commands(case: Case, folder: str, serving: Serving | None) -> tuple[str, ...]:
    """Return the commands to export the model in `folder` for the requested program; () if it cannot serve it."""
    if serving is None or case.serve is None or serving.verdict in ("impossible", "unknown"):
        return ()
    source, commands = folder, []
    if serving.converted:
        source = f"{folder.partition('/')[0]}-stock"
        commands.append(line("to-native", folder, "-o", source))
    return (*commands, line("export", source, "--target", case.serve))
