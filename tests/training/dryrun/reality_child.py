"""Trains small models for two steps each, really, and prints what the process held at most beyond the start."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_posswap
from hf_posswap.patching.inspect.describe import read_config
from hf_posswap.training.config import Recipe, make_recipe
from hf_posswap.training.dryrun.windows import made_windows
from hf_posswap.training.engine.arguments import training_arguments
from hf_posswap.training.engine.objectives import make_objective
from hf_posswap.training.engine.trainer import PosswapTrainer
from hf_posswap.training.trainable import parameter_groups, prepare_trainable
from tests.training.engine.memory_child import status

STEPS = 2


def measure(values: dict[str, Any]) -> int:
    """Return the most bytes that a training by the recipe of `values` adds to this process."""
    recipe = make_recipe(values)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier training freed would be used again, and not be seen
    before = status("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(recipe, Path(folder))
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        trainer.train()
    return status("VmHWM") - before


def _trainer(recipe: Recipe, folder: Path) -> PosswapTrainer:
    torch.manual_seed(0)
    config = read_config(recipe.model.name)
    model = getattr(transformers, config.architectures[0])(config)
    hf_posswap.patch_model(model, recipe.swap.scheme, max_length=recipe.swap.max_length)
    plan = hf_posswap.swap_plan(model)
    model = prepare_trainable(model, recipe.trainable, recipe.peft)
    data = made_windows(
        recipe.data, config, causal=True, scheme_length=plan.max_length, first_position=0, dtype=model.dtype
    )
    rows = recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps
    return PosswapTrainer(
        model,
        training_arguments(recipe, folder),
        objective=make_objective(recipe.objective, causal=True, teacher=None, window=0, chunk=recipe.objective.chunk),
        groups=lambda one: parameter_groups(one, recipe.trainable, learning_rate=1e-4, weight_decay=0.0),
        identity={},
        data_collator=data.collate,
        train_dataset=data.steps(STEPS, rows),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    measure(asked[0])  # what is loaded and kept once has no part in it
    found = [measure(values) for values in asked]
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(json.dumps(found))
