"""From a recipe to transformers' TrainingArguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from hf_posswap.compat.transformers_trainer import checkpointing_argument, use_one_gpu
from hf_posswap.errors import ConfigError
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
    arguments = TrainingArguments(
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
        use_cpu=on_cpu(recipe),
        dataloader_num_workers=compute.workers,
        dataloader_pin_memory=not on_cpu(recipe),
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
    use_one_gpu(arguments)  # a process without a launcher may see several
    return arguments


def _fused(recipe: Recipe) -> bool:
    if recipe.optimizer.fused is not None:
        return recipe.optimizer.fused
    return torch.cuda.is_available() and not on_cpu(recipe)


def on_cpu(recipe: Recipe) -> bool:
    """Return whether `recipe` is computed on the CPU, by its wish or for want of anything else."""
    return recipe.compute.device == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())


def _checkpointing(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments for making activations again.

    Raises:
        ConfigError: this transformers cannot do what is asked for.
    """
    if not recipe.compute.checkpointing:
        return {}
    name = checkpointing_argument()
    options: dict[str, Any] = {"use_reentrant": False}
    if recipe.compute.offload and not on_cpu(recipe):  # on a CPU they lie there anyway
        if name == "gradient_checkpointing":
            raise ConfigError("compute.offload needs a later transformers: update it, or leave offload out.")
        options["offload"] = True
    return {name: True, f"{name}_kwargs": options}
