"""From a recipe to transformers' TrainingArguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from hf_posswap.training.config import Recipe

_OWN_REPORTERS = ("tensorboard",)


def training_arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """Return the arguments of a Trainer that keeps its checkpoints in `folder`.

    Windows are read in order, tokens are averaged over processes, and no filter hides a NaN. The learning rate is
    `rate_share`'s, not theirs.

    Args:
        recipe: without stages.
        folder: for checkpoints.
    """
    optimizer, compute = recipe.optimizer, recipe.compute
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=optimizer.steps,
        per_device_train_batch_size=optimizer.batch,
        gradient_accumulation_steps=optimizer.accumulate,
        learning_rate=optimizer.learning_rate,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        max_grad_norm=optimizer.clip,
        optim="adamw_torch_fused" if _fused(recipe) else "adamw_torch",
        bf16=optimizer.precision == "bfloat16",
        seed=optimizer.seed,
        data_seed=recipe.data.seed,
        use_cpu=compute.device == "cpu",
        torch_compile=compute.compile,
        dataloader_num_workers=compute.workers,
        dataloader_pin_memory=compute.device != "cpu",
        train_sampling_strategy="sequential",
        average_tokens_across_devices=True,
        remove_unused_columns=False,
        logging_steps=recipe.watch.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.save.every,
        report_to=[name for name in recipe.watch.report_to if name not in _OWN_REPORTERS],
        disable_tqdm=True,
        log_level="warning",
        **_checkpointing(recipe),
    )


def _fused(recipe: Recipe) -> bool:
    import torch

    if recipe.optimizer.fused is not None:
        return recipe.optimizer.fused
    return torch.cuda.is_available() and recipe.compute.device != "cpu"


def _checkpointing(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments for making activations again; transformers renamed them in 5.15."""
    if not recipe.compute.checkpointing:
        return {}
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    options: dict[str, Any] = {"use_reentrant": False}
    if recipe.compute.offload and name == "activation_checkpointing":
        options["offload"] = True
    return {name: True, f"{name}_kwargs": options}
