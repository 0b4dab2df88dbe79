"""Predicted memory and work of recipes on GPUs, by dry runs: from configs alone, on any machine.

python -m recipes.bench.dry

Writes results/dry.md and results/dry.json: the command of each row, its prediction, and the versions.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import GPT2Config, LlamaConfig

from hf_posswap import load_recipe
from hf_posswap.training.dryrun import CARDS, DryRun, card_of, dry_run, launch_file
from hf_posswap.utils.atomic_io import write_text

MODELS: dict[str, tuple[str, Any]] = {
    "gpt2-124m": ("GPT2LMHeadModel", GPT2Config()),
    "llama-8b": (
        "LlamaForCausalLM",
        LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        ),
    ),
    "llama-70b": (
        "LlamaForCausalLM",
        LlamaConfig(
            vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        ),
    ),
}  # fmt: skip
"""Architecture and config, by folder name."""


@dataclass(frozen=True)
class Run:
    """One dry run.

    Attributes:
        what: description.
        recipe: its name.
        settings: changes to it.
        gpu: the card.
        accelerate: file of the launch, by name; None: none.
        processes: None: the file's.
    """

    what: str
    recipe: str
    settings: tuple[str, ...]
    gpu: str
    accelerate: str | None = None
    processes: int | None = None

    @property
    def command(self) -> str:
        """The equivalent command line."""
        arguments = ["posswap", "train", self.recipe, *self.settings, "--dry-run", "--gpu", self.gpu]
        arguments += [] if self.accelerate is None else ["--accelerate", self.accelerate]
        arguments += [] if self.processes is None else ["--processes", str(self.processes)]
        return shlex.join(arguments)


RUNS = (
    Run("learned-to-rope on GPT-2 124M, one 80 GB card", "learned-to-rope", ("model.name=gpt2-124m",), "h100"),
    Run("the same on one 24 GB card", "learned-to-rope", ("model.name=gpt2-124m",), "4090"),
    Run(
        "yarn to 32k on an 8B Llama, FSDP2 on 8 x 80 GB", "yarn",
        ("model.name=llama-8b", "data.length=32768", "training.gradient_accumulation_steps=8"), "h100", "fsdp2", 8,
    ),
    Run(
        "yarn by LoRA on an 8B Llama, one 24 GB card", "yarn",
        ("model.name=llama-8b", "model.dtype=bfloat16", "data.length=8192", "peft.peft_type=LORA"), "4090",
        "single-gpu",
    ),
    Run("yarn on an 8B Llama, one 80 GB card", "yarn", ("model.name=llama-8b", "data.length=8192"), "h100",
        "single-gpu"),
    Run(
        "yarn on a 70B Llama, FSDP2 on 32 x 80 GB", "yarn",
        ("model.name=llama-70b", "data.length=8192", "training.gradient_accumulation_steps=2"), "h100", "fsdp2", 32,
    ),
)  # fmt: skip


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Of RUNS, by number from 1; none: all.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path(__file__).parent / "results",
) -> None:
    """Dry-run all and save the results; rows that are not run again are kept."""
    chosen = [RUNS[int(name) - 1] for name in names or map(str, range(1, len(RUNS) + 1))]
    file = out / "dry.json"
    row_by_name = {row["what"]: row for row in json.loads(file.read_text(encoding="utf-8"))} if file.exists() else {}
    for run in chosen:
        typer.echo(run.command)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        row_by_name[run.what] = {"what": run.what, "command": run.command, **versions, **_dry_run(run).to_dict()}
        rows = [row_by_name[listed.what] for listed in RUNS if listed.what in row_by_name]
        write_text(file, json.dumps(rows, indent=1) + "\n")
        write_text(out / "dry.md", table(rows))
    typer.echo(table(rows))


def _dry_run(run: Run) -> DryRun:
    with tempfile.TemporaryDirectory() as folder:
        settings = [setting for setting in run.settings if not setting.startswith("model.name=")]
        name = next(setting.partition("=")[2] for setting in run.settings if setting.startswith("model.name="))
        architecture, config = MODELS[name]
        config.architectures = [architecture]
        config.save_pretrained(folder)
        return dry_run(
            load_recipe(run.recipe, [f"model.name={folder}", *settings]),
            gpu=card_of(run.gpu),
            accelerate=None if run.accelerate is None else launch_file(run.accelerate),
            processes=run.processes,
        )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    sections = ["# Dry runs\n\nWritten by `python -m recipes.bench.dry`, without a GPU. No row was measured on one."]
    for row in rows:
        sections.append(f"## {row['what']}\n\n`{row['command']}`\n\ntorch {row['torch']}, transformers "
                     f"{row['transformers']}")  # fmt: skip
        sections.append("\n".join([*_HEAD, *(_line("as it stands", phase) for phase in row["phases"]),
                                *(_line(f"`{row['change']}`", phase) for phase in row["changed"])]))  # fmt: skip
        if row["fits"] is False and row["change"] is None:
            sections.append("No change that the dry run knows makes it fit.")
    sources = "\n".join(f"- {card.name}: {card.source}" for card in CARDS.values())
    return "\n\n".join(sections) + f"\n\nThe cards' numbers:\n\n{sources}\n"


_KINDS = ("weights", "gathered weights", "teacher", "gradients", "optimizer", "activations")
_HEAD = (
    f"| change | fits | peak, GiB | {' | '.join(_KINDS)} | GFLOP a token | MB a token | least s a step | tokens |",
    "|" + "---|" * (7 + len(_KINDS)),
)


def _line(change: str, phase: dict[str, Any]) -> str:
    gib = 1 << 30
    kind_cells = (f"{phase['held_bytes'].get(name, 0) / gib:.2f}" for name in _KINDS)
    cells = [
        change, "yes" if phase["fits"] else "no", f"{phase['peak_bytes'] / gib:.2f}", *kind_cells,
        f"{phase['flops_a_token'] / 1e9:.3g}", f"{phase['moved_bytes_a_token'] / 1e6:.3g}",
        f"{phase['least_seconds_a_step']:.3g}", f"{phase['processes']} x {phase['tokens_a_step']}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    typer.run(main)
