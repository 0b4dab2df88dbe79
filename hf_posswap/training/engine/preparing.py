"""Prepares the model of a recipe for training: loads, swaps, verifies, and chooses the trainable weights."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.checkpoints.load import adapter_source, load
from hf_posswap.compat.transformers_attention import attention_implementation
from hf_posswap.errors import ConfigError
from hf_posswap.families.locating import locate
from hf_posswap.patching.apply.patch_model import patch_model, swap_plan
from hf_posswap.patching.inspect.describe import on_meta
from hf_posswap.patching.plan.plan_swap import plan_swap, unwrap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.sites.attention.backends import MIN_QK_PAIRS
from hf_posswap.patching.verify.verify_swap import verify_swap
from hf_posswap.schemes import Scheme, make_scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.text.tokens import check_token_ids, load_tokenizer, with_eos_token
from hf_posswap.training.chunked_loss import IGNORED, chunking_problem
from hf_posswap.training.config import SENTENCES, Recipe
from hf_posswap.training.data import TokenData, build_data, prove_packing
from hf_posswap.training.data.build import read_text
from hf_posswap.training.data.sources import Say, check_sources, data_notes
from hf_posswap.training.distill import make_teacher
from hf_posswap.training.engine.arguments import on_cpu
from hf_posswap.training.engine.checkpoints import base_identity, load_weights
from hf_posswap.training.engine.fitting import (
    centre,
    check_start,
    first_windows,
    fit_scheme,
    fit_weights,
    fitted_length,
)
from hf_posswap.training.engine.gates import (
    check_held_out,
    check_positions,
    check_reads_text,
    measure_start,
    probe,
    short_of_window,
    short_windows,
    windows_with_loss,
)
from hf_posswap.training.engine.memory import need_message, process_bytes, refuse_too_much, training_need
from hf_posswap.training.engine.objectives import Objective, make_objective
from hf_posswap.training.engine.parallel import Launch, refuse_silent_errors
from hf_posswap.training.engine.sentences import pooling_of
from hf_posswap.training.engine.services import Services
from hf_posswap.training.trainable import prepare_trainable
from hf_posswap.utils.auto_classes import TRUST

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_posswap.families import Sites

_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_PROBED = 4096
"""Most tokens of a window that the checks read."""


@dataclass
class Prepared:
    """A model ready to train.

    Attributes:
        model: swapped, wrapped in adapters if the recipe has them.
        tokenizer: of the model.
        data: training and held-out data.
        objective: the loss.
        plan: of the swap; None: there is none.
        window: positions of the unswapped model.
        recovery: held-out tokens and labels, [N, L], and the unswapped model's loss on them; L is data.length, at most
            its window. None: the stage does not end by it.
        identity: of the base and the documents, as JSON.
        messages: of the checks.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    data: TokenData
    objective: Objective
    plan: SwapPlan | None
    window: int
    recovery: tuple[dict[str, torch.Tensor], float] | None
    identity: dict[str, object]
    messages: list[str] = field(default_factory=list)


def prepare(
    recipe: Recipe,
    launch: Launch,
    services: Services,
    *,
    weights: Path | None = None,
    resumes: bool = False,
    recovers: bool = False,
) -> Prepared:
    """Return the prepared training of `recipe`, after all checks passed.

    Args:
        recipe: without stages.
        launch: how this process was started.
        services: for output, and the free memory.
        weights: a checkpoint of the previous stage, whose weights are loaded into the swapped model.
        resumes: whether training resumes from a checkpoint, so that the first loss was checked before.
        recovers: whether to measure the unswapped model's loss in its window, for a stage that ends by it.

    Raises:
        PosswapError: a check failed, before anything is trained.
    """
    say = services.reporter.line if services.reporter else None
    tokenizer = _read_before_loading(recipe, say)
    tell = say if say is not None and os.environ.get("RANK", "0") == "0" else lambda line: None
    tell(f"loading the weights of {recipe.model.name}")
    model = load_model(recipe)
    check_reads_text(model, recipe.objective.kind)
    check_carried(recipe, model)
    base = base_identity(model)
    if recipe.data.eos_token is not None:
        stop_at(model, tokenizer.eos_token_id)
    sites = locate(model)
    causal, window = sites.geometry.causal, sites.geometry.original_length
    scheme = chosen_scheme(recipe)
    swap_options = swap_arguments(recipe, scheme, has_table=sites.geometry.base is None)
    plan = None if scheme is None else plan_swap(model, scheme, **swap_options)
    refuse_silent_errors(recipe, plan.scheme if plan else None, launch)
    check_start(model, scheme, plan, recipe.swap)
    mean = centre(model) if recipe.swap.centre else None
    data = build_data(
        recipe.data,
        tokenizer,
        causal=causal,
        scheme_length=plan.max_length if plan else window,
        first_position=sites.first_position,
        dtype=model.dtype,
        say=say,
    )
    check_held_out(data.held_out, recipe.evaluation.lengths)
    _move_to_gpu(model, recipe, launch, services)
    batch, note = _first_batch(recipe, model, data, plan, sites)
    tell(f"checking the start on {len(batch['input_ids'])} windows of {batch['input_ids'].shape[1]} tokens")
    pooling = pooling_of(recipe.model) if recipe.objective.kind in SENTENCES else None
    start = measure_start(recipe, model, batch, causal=causal, window=window, pooling=pooling)
    recovery = None
    if recovers and causal:  # held-out tokens, and the loss of the unswapped model on two documents of them
        short = short_windows(data.held_out, min(window, recipe.data.length), data.held_out_counted)
        recovery = short, probe(model, short, causal=True)
    fitted_to = first_windows(data.train, recipe.swap.fit, fitted_length(sites.geometry)) if recipe.swap.fit else []
    if scheme is not None:
        scheme = fit_scheme(model, scheme, fitted_to) if fitted_to else scheme
        plan = swap_plan(patch_model(model, scheme, **swap_options))
    teacher = make_teacher(model) if recipe.objective.kind in ("distill", "embedding") else None
    fitted = fit_weights(model, fitted_to) if fitted_to else ""
    messages = [] if plan is None else [f"swap verified: {', '.join(verify_swap(model).checks)}"]
    messages += [*([note] if note else []), *data_notes(data.summary)]
    if (warning := short_of_window(max(recipe.data.lengths), window, batch, plan)) is not None:
        messages.append(warning)
    if mean is not None:
        messages.append(f"the table's mean, of norm {float(mean.norm()):.2g}, went into the token embeddings")
    if fitted:
        messages.append(fitted)
    if recipe.gates.start and not resumes and weights is None:
        messages.append(start.check(model, plan, recipe.gates.start_above))
        prove_packing(model, data)
        lengths_text = (
            f" of each length: {', '.join(map(str, recipe.data.lengths))}" if len(recipe.data.lengths) > 1 else ""
        )
        messages.append(f"data.packing {recipe.data.packing} verified on one batch{lengths_text}")
    model = prepare_trainable(model, recipe.trainable, recipe.peft)
    if weights is not None:
        load_weights(model, weights)
    chunk, note = chosen_chunk(recipe, model, batch, launch, causal=causal)
    messages += [*([note] if note else []), _check_memory(recipe, model, teacher, launch, services, chunk)]
    compile_settings = {"backend": recipe.training.torch_compile_backend, "mode": recipe.training.torch_compile_mode}
    if recipe.training.torch_compile or any(compile_settings.values()):
        compile_options = {name: value for name, value in compile_settings.items() if value is not None}
        messages.append(
            f"{compile_layers(model, sites.attention, **compile_options)} layers are compiled, each separately"
        )
    masking = data.train.masking
    objective = make_objective(
        recipe.objective,
        causal=causal,
        teacher=teacher,
        window=window,
        chunk=chunk,
        pooling=pooling,
        around=(len(masking.before), len(masking.after)) if masking else (0, 0),
    )
    return Prepared(model, tokenizer, data, objective, plan, window, recovery, base | data.identity, messages)


def _move_to_gpu(model: nn.Module, recipe: Recipe, launch: Launch, services: Services) -> None:
    """Move `model` to its GPU, if it fits there unsharded, so that the checks are fast."""
    if on_cpu(recipe) or launch.shards or not torch.cuda.is_available():
        return
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    free = services.free_bytes(device) if services.free_bytes else None
    if free is None or sum(p.numel() * p.element_size() for p in model.parameters()) < free:
        model.to(device)


def _first_batch(
    recipe: Recipe, model: PreTrainedModel, data: TokenData, plan: SwapPlan | None, sites: Sites
) -> tuple[dict[str, Any], str]:
    """Return the beginning of two windows as a batch, after checking tokens and positions, and a note on it or ""."""
    items = [data.train[item] for item in range(2)]
    whole = data.collate(items)
    check_token_ids(model, whole["input_ids"].numpy())
    unbounded = plan.unbounded if plan else sites.table_path is None
    reach = plan.max_length if plan else sites.geometry.original_length
    check_positions(whole, recipe.data.length, reach, sites.first_position, unbounded=unbounded)
    read_before = min(_PROBED, sites.geometry.original_length)  # by the unswapped model
    numbers = windows_with_loss(data.train, read_before)
    items = [{name: values[:_PROBED] for name, values in data.train[number].items()} for number in numbers or range(2)]
    if numbers:
        return data.collate(items), ""
    for item in items:
        real = item.get("attention_mask", torch.ones_like(item["input_ids"]))
        item["labels"] = item["input_ids"].masked_fill(real == 0, IGNORED)
    return data.collate(items), (
        f"the loss counts none of the first {read_before} tokens of the first windows: the start is checked on all "
        "tokens there"
    )


def compile_layers(model: PreTrainedModel, attention: tuple[str, ...], **how: object) -> int:
    """Make torch.compile compile each layer of `model` when it first runs, and return the number of layers.

    Only layers are compiled, so that the loss can run body and head separately, and equal layers compile once.

    Args:
        model: a transformers or PEFT model.
        attention: paths of its attention modules, one per layer.
        how: backend and mode of torch.compile.
    """
    inner = unwrap(model)
    paths = {re.sub(r"(\.\d+)\..*", r"\1", path) for path in attention}
    for path in sorted(paths):
        inner.get_submodule(path).compile(**how)
    return len(paths)


def load_model(recipe: Recipe) -> PreTrainedModel:
    """Return the model to start from.

    Raises:
        CheckpointError: it cannot be read.
        RemoteCodeError: it needs remote code, which the recipe does not allow.
        ConfigError: it is quantized, and the recipe trains no adapter.
    """
    settings = recipe.model
    options: dict[str, Any] = {"dtype": "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)}
    if settings.attention is not None:
        options["attn_implementation"] = settings.attention
    options |= {TRUST: settings.trust_remote_code} | (
        {} if recipe.model.revision is None else {"revision": recipe.model.revision}
    )
    model = load(settings.source, **options)
    if getattr(unwrap(model), "hf_quantizer", None) is not None and recipe.peft is None and unwrap(model) is model:
        raise ConfigError(
            f"model.name: {settings.name} is quantized, and such weights cannot be trained: set peft.r=16, for "
            "an adapter, or name the model before it was quantized."
        )
    return model


def load_recipe_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model to start from, with the end-of-text token that the recipe names.

    The model's own is that of model.revision; one that model.tokenizer names has no revision.

    Raises:
        DataError: it cannot be read, or has no such token.
        RemoteCodeError: it needs remote code, which the recipe does not allow.
    """
    settings = recipe.model
    hub = {} if settings.tokenizer is not None or settings.revision is None else {"revision": settings.revision}
    tokenizer = load_tokenizer(
        settings.tokenizer or settings.source,
        instead="name one as model.tokenizer",
        trust_remote_code=settings.trust_remote_code,
        **hub,
    )
    return with_eos_token(tokenizer, recipe.data.eos_token)


def stop_at(model: PreTrainedModel, token: int) -> None:
    """Add `token` to the ids at which generation by `model` stops."""
    model = unwrap(model)
    model.config.get_text_config().eos_token_id = token
    if (generation := getattr(model, "generation_config", None)) is None:
        return
    stops = generation.eos_token_id
    stops = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    generation.eos_token_id = token if stops in ([], [token]) else [token, *(stop for stop in stops if stop != token)]


def check_config(recipe: Recipe) -> bool:
    """Check the swap of `recipe`, its centring and its fit by the model's config, and return whether it is causal.

    Raises:
        PosswapError: as `prepare`, for what the config shows.
    """
    if recipe.model.revision is not None or adapter_source(recipe.model.source) is not None:
        return recipe.objective.predicts_next_token
    skeleton = on_meta(recipe.model.source, **{TRUST: recipe.model.trust_remote_code})
    check_reads_text(skeleton, recipe.objective.kind)
    check_carried(recipe, skeleton)
    geometry, scheme = locate(skeleton).geometry, chosen_scheme(recipe)
    if scheme is not None:
        plan = plan_swap(skeleton, scheme, **swap_arguments(recipe, scheme, has_table=geometry.base is None))
        if recipe.model.dtype != "auto":  # the dtype that the weights are loaded in
            check_start(skeleton.to(getattr(torch, recipe.model.dtype)), scheme, plan, recipe.swap)
    return geometry.causal


def check_carried(recipe: Recipe, model: PreTrainedModel) -> None:
    """Raise a ConfigError if `recipe` swaps a model that carries a swap, or trains the positions of one without any."""
    swap, carried, name = recipe.swap.scheme, getattr(unwrap(model), "_posswap", None), recipe.model.name
    if swap is None and carried is None and recipe.trainable.what in ("positions", "new_rows"):
        raise ConfigError(
            f"trainable.what {recipe.trainable.what} needs a swap: swap.scheme is none, and {name} carries none."
        )
    if swap is not None and carried is not None:
        raise ConfigError(
            f"swap.scheme: {name} already carries {carried.plan.named}. To train it as it is, set swap.scheme=null "
            "(recipe control); for another mechanism name the model that it was made from."
        )


def _read_before_loading(recipe: Recipe, say: Say | None) -> PreTrainedTokenizerBase:
    """Check config and text before the weights are read, which may take long; return the tokenizer.

    The text is tokenized: `build_data` reads it from the cache.

    Raises:
        PosswapError: as `prepare`, for what the config and the text show.
    """
    check_sources(recipe.data)
    causal = check_config(recipe)
    tokenizer = load_recipe_tokenizer(recipe)
    text = read_text(recipe.data, tokenizer, causal=causal, say=say)
    check_held_out(text.lengthy, recipe.evaluation.lengths)
    return tokenizer


def chosen_scheme(recipe: Recipe) -> Scheme | None:
    """Return the scheme of `recipe`'s swap, in a blend if it is gradual; None: no swap."""
    value = recipe.swap.scheme
    if value is None:
        return None
    scheme = make_scheme(value if isinstance(value, str) else dict(value))
    return Blend(new=scheme, weight=0.0) if recipe.swap.gradual_steps else scheme


def swap_arguments(recipe: Recipe, scheme: Scheme | None, *, has_table: bool) -> dict[str, Any]:
    """Return the arguments of `patch_model` other than the scheme.

    Args:
        recipe: without stages.
        scheme: of the swap; None: no swap.
        has_table: whether the model has a position table, whose length limits a blend.
    """
    length = None if isinstance(scheme, Blend) and has_table else recipe.swap.max_length
    return {"max_length": length, "site": recipe.swap.site, "relative": recipe.swap.relative}


def chosen_chunk(
    recipe: Recipe, model: PreTrainedModel, batch: dict[str, object], launch: Launch, *, causal: bool
) -> tuple[int, str]:
    """Return the chunk size of the loss, and a note if the recipe's cannot be used."""
    chunk = recipe.objective.chunk
    if not chunk or recipe.objective.kind not in ("next-token", "masked"):
        return chunk, ""
    if launch.deepspeed == 3:
        return 0, "logits are not chunked: ZeRO-3 releases the head's weights between chunks"
    problem = chunking_problem(model, batch, chunk=chunk, causal=causal)
    return (0, f"logits are not chunked: {problem}") if problem else (chunk, "")


def _check_memory(
    recipe: Recipe,
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    launch: Launch,
    services: Services,
    chunk: int,
) -> str:
    need = training_need(
        model, recipe, launch, biased=_lengths_with_scores(recipe, model), chunk=chunk, teacher=teacher
    )
    free = services.free_bytes(torch.device("cpu" if on_cpu(recipe) else "cuda")) if services.free_bytes else None
    if recipe.gates.start:
        refuse_too_much(need, free, recipe, loaded=on_cpu(recipe))
    return need_message(need, process_bytes() if on_cpu(recipe) else None)


def _lengths_with_scores(recipe: Recipe, model: PreTrainedModel) -> tuple[int, ...]:
    """Return the window lengths for which attention materializes all scores; with a bias, only short ones.

    On a CPU, torch's attention materializes them where it drops some out.
    """
    text = model.config.get_text_config()
    drops = any(getattr(text, name, 0.0) for name in _ATTENTION_DROPOUTS)
    if attention_implementation(model.config) == "eager" or (on_cpu(recipe) and drops):
        return recipe.data.lengths
    plan = getattr(getattr(model, "_posswap", None), "plan", None)
    if plan is None or plan.scheme.kind not in ("bias", "mixed"):
        return ()
    return tuple(length for length in recipe.data.lengths if length**2 < MIN_QK_PAIRS)
