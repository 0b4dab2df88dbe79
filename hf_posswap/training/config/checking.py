"""What cannot work together in a recipe, found before anything is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from hf_posswap.errors import PosswapError
from hf_posswap.schemes import make_scheme
from hf_posswap.training.config.settings import Recipe, StageSettings
from hf_posswap.training.config.stages import scheme_of
from hf_posswap.training.trainable import ADAPTERS

_REPORTERS = ("tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "clearml", "swanlab")


def check(recipe: Recipe) -> list[str]:
    """Return what is impossible in `recipe`, a sentence a problem.

    Example:
        >>> from hf_posswap.training.config.settings import ModelSettings, OptimizerSettings
        >>> check(Recipe(model=ModelSettings("gpt2"), optimizer=OptimizerSettings(warmup=2000)))
        ['optimizer.warmup: 2000 steps of warm-up in a training of 1000.']
    """
    checks = (_model(recipe), _swap(recipe), _objective(recipe), _optimizer(recipe), _rest(recipe), _stages(recipe))
    return [problem for found in checks for problem in found]


def _model(recipe: Recipe) -> Iterator[str]:
    if not recipe.model.name:
        yield "model.name: give a folder or a Hub id."
    if not recipe.out:
        yield "out: give a folder."


def _swap(recipe: Recipe) -> Iterator[str]:
    swap = recipe.swap
    if swap.max_length is not None and swap.max_length < 1:
        yield f"swap.max_length: expected a number of tokens from 1, got {swap.max_length}."
    if swap.gradual_steps < 0:
        yield f"swap.gradual_steps: expected a number of steps from 0, got {swap.gradual_steps}."
    if swap.scheme is None:
        wanting = {
            "swap.max_length": swap.max_length is not None,
            "swap.gradual_steps": swap.gradual_steps > 0,
            "train.what": recipe.train.what in ("positions", "new_rows"),
            "objective.kind": recipe.objective.kind in ("distill", "embedding"),
            "stages": bool(recipe.stages),
        }
        yield from (f"{key}: needs a swap, and swap.scheme is none." for key, wants in wanting.items() if wants)
    else:
        yield from _scheme_problem("swap.scheme", swap.scheme)
    if swap.gradual_steps > recipe.optimizer.steps:
        yield f"swap.gradual_steps: {swap.gradual_steps} steps in a training of {recipe.optimizer.steps}."
    if swap.gradual_steps and recipe.train.what in ADAPTERS:
        yield f"swap.gradual_steps: a blend cannot be ended inside adapters ({recipe.train.what}); use train.what=full."
    if swap.gradual_steps and recipe.stages:
        yield "swap.gradual_steps: a gradual swap has one stage; leave one of gradual_steps and stages out."


def _scheme_problem(key: str, scheme: Any) -> Iterator[str]:
    try:
        make_scheme(dict(scheme) if not isinstance(scheme, str) else scheme)
    except PosswapError as error:
        yield f"{key}: {error}"


def _objective(recipe: Recipe) -> Iterator[str]:
    objective = recipe.objective
    if objective.chunk < 0:
        yield f"objective.chunk: expected a number of tokens from 0, got {objective.chunk}."
    if objective.kind in ("distill", "embedding") and recipe.data.packing not in ("none", "documents"):
        yield (
            f"objective.kind: {objective.kind} has the unswapped model read the same windows, and with data.packing "
            f"{recipe.data.packing} they hold positions that it does not have; use none or documents."
        )


def _optimizer(recipe: Recipe) -> Iterator[str]:
    settings = recipe.optimizer
    least = {"steps": 1, "warmup": 0, "batch": 1, "accumulate": 1, "clip": 0, "weight_decay": 0, "seed": 0}
    for name, smallest in least.items():
        if getattr(settings, name) < smallest:
            yield f"optimizer.{name}: expected at least {smallest}, got {getattr(settings, name)}."
    if not settings.learning_rate > 0:
        yield f"optimizer.learning_rate: expected a number above 0, got {settings.learning_rate}."
    for name in ("final_rate", "beta1", "beta2"):
        value, whole = getattr(settings, name), name == "final_rate"
        if not 0 <= value <= 1 or (value == 1 and not whole):
            yield f"optimizer.{name}: expected a share from 0 {'to' if whole else 'to below'} 1, got {value}."
    if settings.warmup > settings.steps and not recipe.stages:
        yield f"optimizer.warmup: {settings.warmup} steps of warm-up in a training of {settings.steps}."


def _rest(recipe: Recipe) -> Iterator[str]:
    watch, save, gates, compute = recipe.watch, recipe.save, recipe.gates, recipe.compute
    if compute.offload and not compute.checkpointing:
        yield "compute.offload: keeps checkpointed activations elsewhere; set compute.checkpointing too."
    for key, value, smallest in (
        ("compute.workers", compute.workers, 0),
        ("gates.explosion", gates.explosion, 0),
        ("gates.window", gates.window, 1),
        ("save.every", save.every, 1),
        ("save.keep", save.keep, 1),
        ("watch.log_every", watch.log_every, 1),
        ("watch.evaluate_every", watch.evaluate_every, 0),
        ("watch.evaluate_documents", watch.evaluate_documents, 2),
    ):
        if value < smallest:
            yield f"{key}: expected at least {smallest}, got {value}."
    if watch.evaluate_every and not watch.evaluate_lengths:
        yield "watch.evaluate_every: say at which lengths: watch.evaluate_lengths."
    if any(length < 2 for length in watch.evaluate_lengths):
        yield f"watch.evaluate_lengths: expected at least 2 tokens each, got {list(watch.evaluate_lengths)}."
    if watch.evaluate_lengths and recipe.objective.kind in ("masked", "embedding"):
        yield "watch.evaluate_lengths: measures next-token loss, which an encoder has not; leave it empty."
    yield from _missing(recipe)


def _missing(recipe: Recipe) -> Iterator[str]:
    for name in recipe.watch.report_to:
        if name not in _REPORTERS:
            yield f"watch.report_to: unknown {name!r}. Known: {', '.join(_REPORTERS)}."
        elif importlib.util.find_spec(name) is None:
            yield f"watch.report_to: {name} is not installed: pip install {name}, or leave it out."
    if recipe.watch.picture and importlib.util.find_spec("matplotlib") is None:
        yield "watch.picture: needs matplotlib: pip install 'hf-posswap[plot]', or watch.picture=false."
    needed = ["accelerate", "datasets"] + (["peft"] if recipe.train.what in ADAPTERS else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        yield f"training needs {', '.join(missing)}: pip install 'hf-posswap[train]'."


def _stages(recipe: Recipe) -> Iterator[str]:
    if not recipe.stages or recipe.swap.scheme is None:
        return
    kinds = set()
    for number, stage in enumerate(recipe.stages):
        key = f"stages[{number}]"
        yield from _numbers(key, stage)
        scheme = scheme_of(recipe, stage)
        problems = list(_scheme_problem(f"{key}.scheme", scheme))
        yield from problems
        if not problems and scheme is not None:
            kinds.add(make_scheme(dict(scheme) if not isinstance(scheme, str) else scheme).kind)
    if kinds - {"rotary", "none"}:
        yield (
            "stages: the next stage goes on with the weights of the one before, which only schemes without weights of "
            f"their own allow (rotary ones, or nope); got {', '.join(sorted(kinds))}."
        )


def _numbers(key: str, stage: StageSettings) -> Iterator[str]:
    if stage.steps < 1 or not 0 <= stage.least_steps <= stage.steps or stage.check_every < 1:
        yield f"{key}: expected steps and check_every from 1, and least_steps from 0 to steps."
    if stage.length is not None and stage.length < 4:
        yield f"{key}.length: expected at least 4 tokens, got {stage.length}."
    if stage.learning_rate is not None and not stage.learning_rate > 0:
        yield f"{key}.learning_rate: expected a number above 0, got {stage.learning_rate}."
    if stage.recovered is not None and stage.recovered < 0:
        yield f"{key}.recovered: expected nats from 0, got {stage.recovered}."
