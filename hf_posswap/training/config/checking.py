"""Checks for recipe values that cannot work together, before anything is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from hf_posswap.checkpoints.hub import checked_repo_id
from hf_posswap.errors import PosswapError
from hf_posswap.patching.record.record import LONGEST
from hf_posswap.schemes import Scheme, make_scheme
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.config.settings import SENTENCES, Recipe, SchemeValue, StageSettings, scheme_of
from hf_posswap.training.config.theirs import REFUSED
from hf_posswap.training.config.typed import Problem
from hf_posswap.training.data.settings import cut_problem

_OFFLOADS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
_MAX_SEED = 2**32 - 1  # NumPy's limit; transformers seeds NumPy too
_MODULE_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo")  # they take modules or a model, not parameters


def check(recipe: Recipe) -> list[Problem]:
    """Return the problems of `recipe`.

    Example:
        >>> from hf_posswap.training.config import ModelSettings, TrainingSettings
        >>> problems = check(Recipe(model=ModelSettings("gpt2"), training=TrainingSettings(warmup_steps=2000)))
        >>> [str(problem) for problem in problems]
        ['training.warmup_steps: 2000 steps of warm-up in a training of 1000.']
    """
    checks = (
        *(_model, _swap, _fit, _gradual, _objective, _trainable, _refused, _training, _sizes, _computing),
        *(_rest, _evaluation, _missing, _stages),
    )
    return [problem for check_section in checks for problem in check_section(recipe)]


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
        scheme = _build_scheme(swap.scheme)
        if isinstance(scheme, str):
            yield Problem("swap.scheme", scheme)
        return
    set_keys = {
        "swap.max_length": swap.max_length is not None,
        "swap.relative": swap.relative is not None,
        "swap.centre": swap.centre,
        "swap.fit": swap.fit > 0,
        "swap.gradual_steps": swap.gradual_steps > 0,
        "objective.kind": recipe.objective.kind in ("distill", "embedding"),
        "stages": bool(recipe.stages),
    }
    for key in (key for key, is_set in set_keys.items() if is_set):
        yield Problem(key, "needs a swap, and swap.scheme is none.", ("swap.scheme",))


def _fit(recipe: Recipe) -> Iterator[Problem]:
    key, swap = "swap.fit", recipe.swap
    if swap.centre and recipe.peft is not None:
        message = (
            "it changes the base's own token embeddings, which adapters do not hold; leave one of centre and peft out."
        )
        yield Problem("swap.centre", message, ("peft",))
    if swap.fit < 0:
        yield Problem(key, f"expected a number of windows from 0, got {swap.fit}.")
    if swap.fit < 1:
        return
    if recipe.stages:
        yield Problem(key, "every stage would fit anew; leave one of fit and stages out.", ("stages",))
    if swap.gradual_steps:
        message = "a fitted mechanism starts whole, and a gradual one from 0; leave one of fit and gradual_steps out."
        yield Problem(key, message, ("swap.gradual_steps",))
    if recipe.peft is not None and isinstance(_build_scheme(swap.scheme), RotaryScheme):
        message = (
            "a fitted rotation changes the base's own queries and keys, which adapters do not hold; leave one out."
        )
        yield Problem(key, message, ("peft",))


def _gradual(recipe: Recipe) -> Iterator[Problem]:
    key, steps, most = "swap.gradual_steps", recipe.swap.gradual_steps, recipe.training.max_steps
    if steps < 0:
        yield Problem(key, f"expected a number of steps from 0, got {steps}.")
    if steps > most:
        yield Problem(key, f"{steps} steps in a training of {most}.", ("training.max_steps",))
    if steps and recipe.peft is not None:
        yield Problem(key, f"a blend cannot be ended inside adapters ({recipe.what}); leave peft out.", ("peft",))
    if steps and recipe.stages:
        yield Problem(key, "a gradual swap has one stage; leave one of gradual_steps and stages out.", ("stages",))


def _build_scheme(scheme: SchemeValue) -> Scheme | str:
    """Return the scheme, or the error message that says why it cannot be built."""
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
    if objective.kind == "distill" and packing not in ("none", "documents", "concatenated"):
        yield Problem(
            "objective.kind",
            f"distill runs the unswapped model on the same windows, and data.packing {packing} uses "
            "positions that it does not have; use none, documents or concatenated.",
            ("data.packing",),
        )
    if objective.kind == "longce" and objective.longce.context >= recipe.data.length:
        yield Problem(
            "objective.longce.context",
            f"weighs what text beyond {objective.longce.context} tokens helps, and windows have {recipe.data.length}; "
            "take a shorter context, or a longer data.length.",
            ("data.length",),
        )
    if objective.kind == "longce" and packing not in ("none", "documents", "concatenated"):
        message = f"longce reads windows again in short ones, and data.packing {packing} has positions that jump."
        yield Problem("objective.kind", f"{message} Use none, documents or concatenated.", ("data.packing",))
    if objective.kind == "distill" and objective.distill.relations and recipe.training.torch_compile:
        message = "records queries and keys, which a compiled forward does not hand out; use torch_compile=false."
        yield Problem("objective.distill.relations", message, ("training.torch_compile",))
    if objective.kind in SENTENCES and len(recipe.data.lengths) > 1:
        message = (
            f"{list(recipe.data.cut)} mixes lengths, and {objective.kind} compares one text with another; use [1]."
        )
        yield Problem("data.cut", message, ("objective.kind",))
    if objective.kind in SENTENCES and packing != "none":
        message = f"{objective.kind} embeds whole texts; windows of data.packing {packing} are not texts; use none."
        yield Problem("objective.kind", message, ("data.packing",))
    yield from _counting(recipe)
    batch = recipe.training.per_device_train_batch_size
    if objective.kind == "contrastive" and batch == 1:
        message = f"contrastive compares the texts of a batch with one another, and a batch has {batch}."
        yield Problem("objective.kind", message, ("training.per_device_train_batch_size",))


def _counting(recipe: Recipe) -> Iterator[Problem]:
    """Yield settings of the loss on chats that their objective or packing cannot follow."""
    data, kind = recipe.data, recipe.objective.kind
    if data.eos_token is not None and (kind == "masked" or kind in SENTENCES):
        yield Problem("data.eos_token", f"objective.kind {kind} does not predict the next token.", ("objective.kind",))
    for name in ("assistant_only_loss", "completion_only_loss"):
        key = f"data.{name}"
        if not getattr(data, name):
            continue
        if kind == "masked" or kind in SENTENCES:
            yield Problem(key, f"objective.kind {kind} does not predict the next token.", ("objective.kind",))
        if data.packing == "pose":
            message = "data.packing pose would separate questions from answers; use none or documents."
            yield Problem(key, message, ("data.packing",))


def _trainable(recipe: Recipe) -> Iterator[Problem]:
    trainable = recipe.trainable
    if recipe.peft is not None and trainable.what != "full":
        message = f"{trainable.what} without adapters, or full, which with peft is adapters and what the swap added."
        yield Problem("trainable.what", message, ("peft",))
    alone = recipe.peft is None and trainable.what in ("full", "new_rows")
    if alone and (trainable.embeddings or trainable.norms):
        message = (
            f"embeddings and norms add to adapters, positions or norms_qk; what is {trainable.what!r} without peft."
        )
        yield Problem("trainable", message, ("peft", "trainable.what"))


def _refused(recipe: Recipe) -> Iterator[Problem]:
    for name, (used, why) in REFUSED.items():
        value = getattr(recipe.training, name, used)
        if value != used:
            fixed = "leave it out" if used is None else f"it is {used}"
            yield Problem(f"training.{name}", f"{fixed}: {why}; got {value!r}.")


def _training(recipe: Recipe) -> Iterator[Problem]:
    settings = recipe.training
    minimums = {
        "max_steps": 1, "warmup_steps": 0, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
        "max_grad_norm": 0, "weight_decay": 0, "seed": 0, "save_total_limit": 1, "dataloader_num_workers": 0,
    }  # fmt: skip
    for name, smallest in minimums.items():
        value = getattr(settings, name)
        if value is not None and value < smallest:
            yield _too_small(f"training.{name}", value, smallest)
    for name in ("logging", "save", "eval"):
        if getattr(settings, f"{name}_strategy") == "steps" and (getattr(settings, f"{name}_steps") or 1) <= 0:
            value = getattr(settings, f"{name}_steps")
            yield Problem(f"training.{name}_steps", f"expected a number above 0, got {value}.")
    if not settings.learning_rate > 0:
        yield Problem("training.learning_rate", f"expected a number above 0, got {settings.learning_rate}.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(settings, name) < 1:
            yield Problem(f"training.{name}", f"expected a share from 0 to below 1, got {getattr(settings, name)}.")
    if settings.warmup_steps > settings.max_steps and not recipe.stages:
        message = f"{settings.warmup_steps:g} steps of warm-up in a training of {settings.max_steps}."
        yield Problem("training.warmup_steps", message, ("training.max_steps", "stages"))
    if settings.optim is not None and settings.optim.startswith(_MODULE_OPTIMIZERS):
        message = f"{settings.optim} builds its own parameter groups, and a recipe sets theirs by `trainable`."
        yield Problem("training.optim", message)
    if settings.optim is not None and settings.optim.startswith("schedule_free"):
        message = (
            f"{settings.optim} evaluates a model at other weights than it trains, and a recipe measures and saves the "
            "latter."
        )
        yield Problem("training.optim", message)


def _sizes(recipe: Recipe) -> Iterator[Problem]:
    """Yield sizes that would exhaust any memory, and seeds out of range, before anything is allocated."""
    lengths = {"data.length": recipe.data.length} | {
        f"stages[{number}].length": stage.length for number, stage in enumerate(recipe.stages) if stage.length
    }
    lengths |= {"evaluation.lengths": max(recipe.evaluation.lengths, default=0)}
    for key, length in lengths.items():
        if length > LONGEST:
            yield Problem(key, f"expected at most {LONGEST} tokens, got {length}.")
    batch, longest = recipe.training.per_device_train_batch_size, min(recipe.data.length, LONGEST)
    if batch * longest > LONGEST:
        message = f"{batch} windows of {longest} tokens at once; the most is {LONGEST} tokens."
        yield Problem("training.per_device_train_batch_size", message, ("data.length",))
    if recipe.training.seed > _MAX_SEED:
        message = f"expected at most {_MAX_SEED}, got {recipe.training.seed}."
        yield Problem("training.seed", message)


def _computing(recipe: Recipe) -> Iterator[Problem]:
    if recipe.training.bf16 and recipe.training.fp16:
        yield Problem("training.fp16", "bf16 is set too: the forward computes in one of the two.", ("training.bf16",))
    for name in _OFFLOADS:
        options = getattr(recipe.training, name, None)
        if isinstance(options, Mapping) and options.get("offload") and not recipe.checkpoints_activations:
            message = "offload keeps checkpointed activations elsewhere; set training.gradient_checkpointing too."
            yield Problem(f"training.{name}", message, ("training.gradient_checkpointing",))


def _rest(recipe: Recipe) -> Iterator[Problem]:
    name = recipe.training.hub_model_id
    if name is not None:
        try:
            checked_repo_id(name)
        except PosswapError as error:
            yield Problem("training.hub_model_id", str(error))
    elif recipe.training.push_to_hub:
        yield Problem("training.push_to_hub", "say where to: training.hub_model_id.", ("training.hub_model_id",))
    gates = recipe.gates
    for key, value, smallest in (
        ("gates.explosion", gates.explosion, 0),
        ("gates.window", gates.window, 1),
        ("evaluation.documents", recipe.evaluation.documents, 2),
    ):
        if value < smallest:
            yield _too_small(key, value, smallest)


def _too_small(key: str, value: float, smallest: int) -> Problem:
    return Problem(key, f"expected at least {smallest}, got {value:g}.")


def _evaluation(recipe: Recipe) -> Iterator[Problem]:
    lengths, objective = recipe.evaluation.lengths, recipe.objective.kind
    if any(length < 2 for length in lengths):
        yield Problem("evaluation.lengths", f"expected at least 2 tokens each, got {list(lengths)}.")
    reason = "measures next-token loss, which an encoder has not; leave it "
    if lengths and objective in ("masked", *SENTENCES):
        yield Problem("evaluation.lengths", f"{reason}empty.", ("objective.kind",))
    if (recipe.training.eval_strategy != "no" or recipe.training.eval_on_start) and objective in ("masked", *SENTENCES):
        yield Problem("training.eval_strategy", f"{reason}out.", ("objective.kind",))
    metric = recipe.training.metric_for_best_model
    metrics = ["loss", *(f"loss_at_{length}" for length in lengths)]
    if metric is not None and metric.removeprefix("eval_") not in metrics:
        known = " or ".join(metrics)
        yield Problem("training.metric_for_best_model", f"expected {known}, got {metric!r}.", ("evaluation.lengths",))


def _missing(recipe: Recipe) -> Iterator[Problem]:
    from transformers.integrations import get_available_reporting_integrations, integration_utils

    known, here = integration_utils.INTEGRATION_TO_CALLBACK, get_available_reporting_integrations()
    report_to = recipe.training.report_to
    names = [report_to] if isinstance(report_to, str) else report_to or []
    for name in () if names == ["none"] else names:
        if name not in (*known, "all"):
            yield Problem("training.report_to", f"unknown {name!r}. Known: {', '.join(known)}.")
        elif name not in (*here, "all"):
            yield Problem("training.report_to", f"{name} is not installed: pip install {name}, or leave it out.")
    if recipe.objective.kind == "contrastive" and importlib.util.find_spec("sentence_transformers") is None:
        message = "contrastive needs sentence-transformers: pip install 'hf-posswap[sentences]'."
        yield Problem("objective.kind", message)
    needed = ["accelerate", "datasets"] + (["peft"] if recipe.peft is not None else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        yield Problem("", f"training needs {', '.join(missing)}: pip install 'hf-posswap[train]'.")


def _stages(recipe: Recipe) -> Iterator[Problem]:
    scheme_kinds = set()
    for number, stage in enumerate(recipe.stages):
        key = f"stages[{number}]"
        yield from _numbers(key, stage)
        if stage.length is not None and (problem := cut_problem(recipe.data.cut, stage.length)) is not None:
            yield Problem(f"{key}.length", f"data.cut {problem}.", ("data.cut",))
        if recipe.swap.scheme is None:
            continue
        scheme = _build_scheme(scheme_of(recipe, stage))
        if isinstance(scheme, Scheme):
            scheme_kinds.add(scheme.kind)
        elif stage.scheme is not None:
            yield Problem(f"{key}.scheme", scheme, ("swap.scheme",))
    if scheme_kinds - {"rotary", "none"}:
        yield Problem(
            "stages",
            "each stage starts from the weights of the previous one, so its scheme cannot have weights "
            f"(use rotary schemes or nope); got {', '.join(sorted(scheme_kinds))}.",
            ("swap.scheme",),
        )


def _numbers(key: str, stage: StageSettings) -> Iterator[Problem]:
    if stage.max_steps < 1 or not 0 <= stage.least_steps <= stage.max_steps or stage.check_every < 1:
        yield Problem(
            key,
            "expected max_steps and check_every from 1, and least_steps from 0 to max_steps.",
            (f"{key}.max_steps", f"{key}.least_steps", f"{key}.check_every"),
        )
    if stage.length is not None and stage.length < 4:
        yield Problem(f"{key}.length", f"expected at least 4 tokens, got {stage.length}.")
    if stage.learning_rate is not None and not stage.learning_rate > 0:
        yield Problem(f"{key}.learning_rate", f"expected a number above 0, got {stage.learning_rate}.")
    if stage.recovered is not None and stage.recovered < 0:
        yield Problem(f"{key}.recovered", f"expected nats from 0, got {stage.recovered}.")
