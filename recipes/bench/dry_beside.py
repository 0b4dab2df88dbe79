"""Compares a dry run's prediction with a GPU's measurement of the same training: memory, and the time of a step.

    python -m recipes.bench.dry_beside --out results

Weights are random, because memory and time do not depend on them. Memory is the peak of torch's allocator; the
prediction should be within 10 %. The predicted time is a lower bound by the card's data sheet, and the ratio shows how
far the training is from it.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import GPT2Config, LlamaConfig, TrainerCallback

import hf_posswap
from hf_posswap.patching.inspect.describe import read_config
from hf_posswap.training.config import Recipe, make_recipe
from hf_posswap.training.dryrun import CARDS, Card, card_of, dry_run
from hf_posswap.training.dryrun.modelling import synthetic_windows
from hf_posswap.training.engine.arguments import training_arguments
from hf_posswap.training.engine.objectives import make_objective
from hf_posswap.training.engine.trainer import PosswapTrainer
from hf_posswap.training.trainable import parameter_groups, prepare_trainable
from hf_posswap.utils.atomic_io import write_text
from hf_posswap.utils.format import said_by
from recipes.bench.harness import machine

WARM_UPS, STEPS = 2, 5
NEAR = 0.1
"""Allowed relative difference of the predicted peak from the measured one."""
_SHAPES: dict[str, tuple[str, Any]] = {
    "gpt2-124m": ("GPT2LMHeadModel", GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
    "llama-1b": (
        "LlamaForCausalLM",
        LlamaConfig(
            vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
            num_key_value_heads=4, max_position_embeddings=2048,
        ),
    ),
    "small": (
        "LlamaForCausalLM",
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        ),
    ),
}  # fmt: skip
"""By the names of their folders: architecture and config."""


def recipes(smoke: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the trainings: a description, the name of a shape, and the difference from the common recipe."""
    if smoke:
        yield "a small Llama, yarn", "small", {"data": {"length": 128}, "training": {"use_cpu": True}}
        return
    rope: dict[str, Any] = {"swap": {"scheme": "rope", "max_length": 8192}, "data": {"length": 8192}}
    yield "GPT-2 124M, rope, one text of 8k", "gpt2-124m", rope
    packed = rope["data"] | {"packing": "documents"}
    yield "the same, packed documents", "gpt2-124m", rope | {"data": packed}
    alibi = {"swap": {"scheme": "alibi", "max_length": 4096}, "data": {"length": 4096}}
    yield "GPT-2 124M, alibi, one text of 4k", "gpt2-124m", alibi
    long = {"data": {"length": 16384}}
    yield "Llama 1.1B, yarn, one text of 16k, checkpointing", "llama-1b", long | {
        "training": {"gradient_checkpointing": True}
    }  # fmt: skip
    yield "the same by LoRA", "llama-1b", long | {
        "training": {"gradient_checkpointing": True}, "peft": {"peft_type": "LORA"}
    }  # fmt: skip


def main(
    smoke: Annotated[bool, typer.Option("--smoke", help="One tiny training, on the CPU if there is no GPU.")] = False,
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path(__file__).parent / "results",
) -> None:
    """Predict, train and save both results."""
    if not (smoke or torch.cuda.is_available()):
        raise typer.BadParameter("there is no CUDA device here; --smoke trains a tiny model without one.")
    rows = []
    for description, shape, values in recipes(smoke):
        try:
            rows.append({"what": description, **_row(shape, values)})
        except Exception as error:  # such as too little memory for one row
            rows.append({"what": description, "error": f"{type(error).__name__}: {said_by(error)}"})
        typer.echo(_line(rows[-1]))
        write_text(out / "dry_beside.json", json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        write_text(out / "dry_beside.md", table(rows))
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def _row(shape: str, values: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(Path(folder), shape, values)
        (predicted,) = dry_run(recipe, gpu=_card()).predictions
        measured = _measure(recipe, Path(folder) / "run")
    return {"predicted": predicted.to_dict(), **measured}


def recipe_of(folder: Path, shape: str, values: dict[str, Any]) -> Recipe:
    """Return the recipe of `values` for a model of `shape`, whose config it writes to `folder`.

    Args:
        folder: that exists.
        shape: a name of `_SHAPES`.
        values: sections of a recipe, in addition to the common ones.
    """
    architecture, config = _SHAPES[shape]
    config.architectures = [architecture]
    config.save_pretrained(folder / shape)
    base_values: dict[str, Any] = {
        "model": {"name": str(folder / shape)},
        "swap": {"scheme": {"name": "yarn", "factor": 8.0}},
        "training": {
            "max_steps": WARM_UPS + STEPS, "per_device_train_batch_size": 1, "bf16": torch.cuda.is_available(),
            "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
        },
    }  # fmt: skip
    return make_recipe(base_values | {key: base_values.get(key, {}) | value for key, value in values.items()})


def _card() -> Card | None:
    """Return the card of this machine: by name if its speed is known, otherwise by memory."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0).lower()
    known = next((card for key, card in CARDS.items() if key in name), None)
    return known or card_of(f"{torch.cuda.get_device_properties(0).total_memory >> 20}MiB")


def _measure(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the peak in bytes (None without a GPU) and the median seconds of a step."""
    on_gpu = torch.cuda.is_available()
    gc.collect()
    baseline = 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        baseline = torch.cuda.memory_allocated()
    clock = _Clock(on_gpu)
    trainer = trainer_of(recipe, folder, steps=WARM_UPS + STEPS)
    trainer.add_callback(clock)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() - baseline if on_gpu else None
    return {"peak_bytes": peak, "seconds_a_step": statistics.median(clock.durations[WARM_UPS:])}


class _Clock(TrainerCallback):
    """Records the time of each step: forward, backward and optimizer."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.durations, self.started = on_gpu, list[float](), 0.0

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.durations.append(self._now() - self.started)


def trainer_of(recipe: Recipe, folder: Path, *, steps: int) -> PosswapTrainer:
    """Return a trainer of a swapped model with random weights by `recipe`, on synthetic tokens.

    Args:
        recipe: for next tokens; its model is a folder with a config.
        folder: for what a training writes.
        steps: that there are tokens for.
    """
    torch.manual_seed(0)
    config = read_config(recipe.model.name)
    assert config.architectures is not None
    model = getattr(transformers, config.architectures[0])(config)
    assert recipe.swap.scheme is not None
    hf_posswap.patch_model(model, recipe.swap.scheme, max_length=recipe.swap.max_length)
    plan = hf_posswap.swap_plan(model)
    model = prepare_trainable(model, recipe.trainable, recipe.peft)
    data = synthetic_windows(
        recipe.data, config, causal=True, scheme_length=plan.max_length, first_position=0, dtype=model.dtype
    )
    rows = recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps
    return PosswapTrainer(
        model,
        training_arguments(recipe, folder),
        objective=make_objective(recipe.objective, causal=True, teacher=None, window=0, chunk=recipe.objective.chunk),
        groups=lambda wrapped: parameter_groups(wrapped, recipe.trainable, learning_rate=1e-4, weight_decay=0.0),
        identity={},
        data_collator=data.collate,
        train_dataset=data.steps(steps, rows),
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, with what they depend on."""
    head = (
        "| training | predicted peak, GiB | measured | ratio | within 10 % | least s a step | measured | ratio |",
        "|---|---|---|---|---|---|---|---|",
    )
    origin = "Written by `python -m recipes.bench.dry_beside`"
    return (
        "\n".join(
            [f"# Dry runs compared with a GPU\n\n{origin}: `{json.dumps(machine())}`\n", *head, *map(_line, rows)]
        )
        + "\n"
    )


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['what']} | NOT MEASURED: {row['error']} | | | | | | |"
    gib, peak, seconds = 1 << 30, row["peak_bytes"], row["seconds_a_step"]
    predicted, least = row["predicted"]["peak_bytes"], row["predicted"]["least_seconds_a_step"]
    memory = ["", "", ""]
    if peak is not None:
        memory = [f"{peak / gib:.2f}", f"{predicted / peak:.3f}", "yes" if abs(predicted / peak - 1) <= NEAR else "no"]
    times = [
        "" if least is None else f"{least:.4f}",
        f"{seconds:.4f}",
        "" if least is None else f"{seconds / least:.2f}",
    ]
    return f"| {' | '.join([row['what'], f'{predicted / gib:.2f}', *memory, *times])} |"


if __name__ == "__main__":
    typer.run(main)
