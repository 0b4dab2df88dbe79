"""What cannot work together in a recipe, found before anything is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from hf_posswap.checkpoints.hub import checked_repo_id
from hf_posswap.errors import PosswapError
from hf_posswap.schemes import Scheme, make_scheme
from hf_posswap.training.config.problems import Problem
from hf_posswap.training.config.settings import SENTENCES, Recipe, SchemeValue, StageSettings
from hf_posswap.training.config.stages import scheme_of
from hf_posswap.training.data.settings import cut_problem
from hf_posswap.training.trainable import ADAPTERS

_REPORTERS = ("tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "clearml", "swanlab")


def check(recipe: Recipe) -> list[Problem]:
    """Return what is impossible in `recipe`.

    Example:
        >>> from hf_posswap.training.config.settings import ModelSettings, OptimizerSettings
        >>> found = check(Recipe(model=ModelSettings("gpt2"), optimizer=OptimizerSettings(warmup=2000)))
        >>> [str(problem) for problem in found]
        ['optimizer.warmup: 2000 steps of warm-up in a training of 1000.']
    """
    checks = (_model, _swap, _gradual, _objective, _optimizer, _rest, _watch, _missing, _stages)
    return [problem for found in checks for problem in found(recipe)]


def _model(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.model.name:
        yield Problem("model.name", "give a folder or a Hub id.")
    if not recipe.out:
        yield Problem("out", "give a folder.")


def _swap(recipe: Recipe) -> Iterator[Problem]:
    swap = recipe.swap
    if swap.max_length is not None and swap.max_length < 1:
        yield Problem("swap.max_length", f"expected a number of tokens from 1, got {swap.max_length}.")
    if swap.scheme is not None:
        made = _made(swap.scheme)
        if isinstance(made, str):
            yield Problem("swap.scheme", made)
        return
    wanting = {
        "swap.max_length": swap.max_length is not None,
        "swap.relative": swap.relative is not None,
        "swap.centre": swap.centre,
        "swap.gradual_steps": swap.gradual_steps > 0,
        "train.what": recipe.train.what in ("positions", "new_rows"),
        "objective.kind": recipe.objective.kind in ("distill", "embedding"),
        "stages": bool(recipe.stages),
    }
    for key in (key for key, wants in wanting.items() if wants):
        yield Problem(key, "needs a swap, and swap.scheme is none.", ("swap.scheme",))


def _gradual(recipe: Recipe) -> Iterator[Problem]:
    key, steps, what = "swap.gradual_steps", recipe.swap.gradual_steps, recipe.train.what
    if steps < 0:
        yield Problem(key, f"expected a number of steps from 0, got {steps}.")
    if steps > recipe.optimizer.steps:
        yield Problem(key, f"{steps} steps in a training of {recipe.optimizer.steps}.", ("optimizer.steps",))
    if steps and what in ADAPTERS:
        said = f"a blend cannot be ended inside adapters ({what}); use train.what=full."
        yield Problem(key, said, ("train.what",))
    if steps and recipe.stages:
        yield Problem(key, "a gradual swap has one stage; leave one of gradual_steps and stages out.", ("stages",))


def _made(scheme: SchemeValue) -> Scheme | str:
    """Return the scheme, or what is wrong with it."""
    try:
        return make_scheme(dict(scheme) if isinstance(scheme, Mapping) else scheme)  # type: ignore[arg-type]
    except PosswapError as error:
        return str(error)


def _objective(recipe: Recipe) -> Iterator[Problem]:
    objective = recipe.objective
    if objective.chunk < 0:
        yield Problem("objective.chunk", f"expected a number of tokens from 0, got {objective.chunk}.")
    if not objective.scale > 0:
        yield Problem("objective.scale", f"expected a number above 0, got {objective.scale}.")
    packing = recipe.data.packing
    if objective.kind == "distill" and packing not in ("none", "documents"):
        yield Problem(
            "objective.kind",
            f"distill has the unswapped model read the same windows, and with data.packing {packing} they hold "
            "positions that it does not have; use none or documents.",
            ("data.packing",),
        )
    if objective.kind in SENTENCES and len(recipe.data.lengths) > 1:
        said = f"{list(recipe.data.cut)} mixes lengths, and {objective.kind} holds one text against another; use [1]."
        yield Problem("data.cut", said, ("objective.kind",))
    if objective.kind in SENTENCES and packing != "none":
        said = f"{objective.kind} makes one vector of a text; windows of data.packing {packing} are no texts; use none."
        yield Problem("objective.kind", said, ("data.packing",))
    if objective.kind == "contrastive" and recipe.optimizer.batch < 2:
        said = f"contrastive holds the texts of a batch against one another, and a batch has {recipe.optimizer.batch}."
        yield Problem("objective.kind", said, ("optimizer.batch",))


def _optimizer(recipe: Recipe) -> Iterator[Problem]:
    settings = recipe.optimizer
    least = {"steps": 1, "warmup": 0, "batch": 1, "accumulate": 1, "clip": 0, "weight_decay": 0, "seed": 0}
    for name, smallest in least.items():
        if getattr(settings, name) < smallest:
            yield _too_small(f"optimizer.{name}", getattr(settings, name), smallest)
    if not settings.learning_rate > 0:
        yield Problem("optimizer.learning_rate", f"expected a number above 0, got {settings.learning_rate}.")
    for name in ("final_rate", "beta1", "beta2"):
        value, whole = getattr(settings, name), name == "final_rate"
        if not 0 <= value <= 1 or (value == 1 and not whole):
            said = f"expected a share from 0 {'to' if whole else 'to below'} 1, got {value}."
            yield Problem(f"optimizer.{name}", said)
    if settings.warmup > settings.steps and not recipe.stages:
        said = f"{settings.warmup} steps of warm-up in a training of {settings.steps}."
        yield Problem("optimizer.warmup", said, ("optimizer.steps", "stages"))


def _too_small(key: str, value: float, smallest: int) -> Problem:
    return Problem(key, f"expected at least {smallest}, got {value}.")


def _rest(recipe: Recipe) -> Iterator[Problem]:
    watch, save, gates, compute = recipe.watch, recipe.save, recipe.gates, recipe.compute
    if compute.offload and not compute.checkpointing:
        said = "keeps checkpointed activations elsewhere; set compute.checkpointing too."
        yield Problem("compute.offload", said, ("compute.checkpointing",))
    if save.push is not None:
        try:
            checked_repo_id(save.push)
        except PosswapError as error:
            yield Problem("save.push", str(error))
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
            yield _too_small(key, value, smallest)


def _watch(recipe: Recipe) -> Iterator[Problem]:
    lengths = recipe.watch.evaluate_lengths
    if recipe.watch.evaluate_every and not lengths:
        yield Problem(
            "watch.evaluate_every", "say at which lengths: watch.evaluate_lengths.", ("watch.evaluate_lengths",)
        )
    if any(length < 2 for length in lengths):
        yield Problem("watch.evaluate_lengths", f"expected at least 2 tokens each, got {list(lengths)}.")
    if lengths and recipe.objective.kind in ("masked", *SENTENCES):
        said = "measures next-token loss, which an encoder has not; leave it empty."
        yield Problem("watch.evaluate_lengths", said, ("objective.kind",))


def _missing(recipe: Recipe) -> Iterator[Problem]:
    for name in recipe.watch.report_to:
        if name not in _REPORTERS:
            yield Problem("watch.report_to", f"unknown {name!r}. Known: {', '.join(_REPORTERS)}.")
        elif importlib.util.find_spec(name) is None:
            yield Problem("watch.report_to", f"{name} is not installed: pip install {name}, or leave it out.")
    if recipe.watch.picture and importlib.util.find_spec("matplotlib") is None:
        said = "needs matplotlib: pip install 'hf-posswap[plot]', or watch.picture=false."
        yield Problem("watch.picture", said)
    if recipe.objective.kind == "contrastive" and importlib.util.find_spec("sentence_transformers") is None:
        said = "contrastive needs sentence-transformers: pip install 'hf-posswap[sentences]'."
        yield Problem("objective.kind", said)
    needed = ["accelerate", "datasets"] + (["peft"] if recipe.train.what in ADAPTERS else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        yield Problem("", f"training needs {', '.join(missing)}: pip install 'hf-posswap[train]'.")


def _stages(recipe: Recipe) -> Iterator[Problem]:
    kinds = set()
    for number, stage in enumerate(recipe.stages):
        key = f"stages[{number}]"
        yield from _numbers(key, stage)
        if stage.length is not None and (problem := cut_problem(recipe.data.cut, stage.length)) is not None:
            yield Problem(f"{key}.length", f"data.cut {problem}.", ("data.cut",))
        if recipe.swap.scheme is None:
            continue
        made = _made(scheme_of(recipe, stage))
        if isinstance(made, Scheme):
            kinds.add(made.kind)
        elif stage.scheme is not None:
            yield Problem(f"{key}.scheme", made, ("swap.scheme",))
    if kinds - {"rotary", "none"}:
        yield Problem(
            "stages",
            "the next stage goes on with the weights of the one before, which only schemes without weights of "
            f"their own allow (rotary ones, or nope); got {', '.join(sorted(kinds))}.",
            ("swap.scheme",),
        )


def _numbers(key: str, stage: StageSettings) -> Iterator[Problem]:
    if stage.steps < 1 or not 0 <= stage.least_steps <= stage.steps or stage.check_every < 1:
        yield Problem(
            key,
            "expected steps and check_every from 1, and least_steps from 0 to steps.",
            (f"{key}.steps", f"{key}.least_steps", f"{key}.check_every"),
        )
    if stage.length is not None and stage.length < 4:
        yield Problem(f"{key}.length", f"expected at least 4 tokens, got {stage.length}.")
    if stage.learning_rate is not None and not stage.learning_rate > 0:
        yield Problem(f"{key}.learning_rate", f"expected a number above 0, got {stage.learning_rate}.")
    if stage.recovered is not None and stage.recovered < 0:
        yield Problem(f"{key}.recovered", f"expected nats from 0, got {stage.recovered}.")
