"""Latency of whole processes, compared with the same task in plain transformers (`recipes.bench.by_hand`).

The first token of a swapped model, a short evaluation, a training of one step, and a plan compared with the imports.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.bench.harness import Case

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "hf_posswap" / "quickstart" / "model"
TURNS = 3  # of seconds each
BY_HAND, BEFORE = "by hand in transformers", "unpatched"
COMMAND = (sys.executable, "-m", "hf_posswap")
SCRIPT = (sys.executable, "-m", "recipes.bench.by_hand")
IMPORTS = "importing torch and the model's class"


def cases(smoke: bool) -> Iterator[Case]:
    """Yield the first token of a model with 7B-sized layers, an evaluation, a training, a plan and the help."""
    with tempfile.TemporaryDirectory() as folder:
        large = _saved(Path(folder) / "large", smoke)
        for scheme in ("yarn",) if smoke else ("yarn", "alibi"):
            ways = {"ours": _run(*SCRIPT, "first_token", large, scheme), BEFORE: _run(*SCRIPT, "first_token", large)}
            yield Case(
                f"load, patch_model with {scheme}, first token", ways, {BEFORE: 1.1}, tolerance=None, repetitions=TURNS
            )
        count = itertools.count()

        def fresh() -> Path:  # finished measurements and trainings are not repeated
            return Path(folder) / str(next(count))

        text = texts_of_source(Path(folder) / "texts")
        evaluating = ("--text", text, "--lengths", 128, "--metrics", "ppl_prefix", "--documents", 2)
        ways = {
            "ours": lambda: _run(*COMMAND, "eval", SMALL, *evaluating, "-o", fresh())(),
            BY_HAND: _run(*SCRIPT, "evaluate", SMALL, text, 128),
        }
        yield Case("posswap eval of two short texts", ways, tolerance=None, repetitions=TURNS)
        recipe = (f"model.name={SMALL}", f"data.sources=[{{path: {text}}}]", "data.length=128",
                  "training.max_steps=1", "training.warmup_steps=0")  # fmt: skip
        ways = {
            "ours": lambda: _run(*COMMAND, "train", "control", *recipe, f"out={fresh()}")(),
            BY_HAND: lambda: _run(*SCRIPT, "train", SMALL, text, 128, fresh())(),
        }
        yield Case("posswap train of one step", ways, tolerance=None, repetitions=TURNS)
        imports = _run(sys.executable, "-c", "import torch; from transformers import GPT2LMHeadModel")
        ways = {"ours": _run(*COMMAND, "explain", SMALL, "alibi"), IMPORTS: imports}
        yield Case("posswap explain MODEL alibi", ways, {IMPORTS: 1.15}, tolerance=None, repetitions=TURNS)
        ways = {"ours": _run(*COMMAND, "--help"), IMPORTS: imports}
        yield Case("posswap --help", ways, {IMPORTS: 0.1}, tolerance=None, repetitions=TURNS)


def _saved(folder: Path, smoke: bool) -> Path:
    """Return the folder of a Llama with a quarter of the layers of a 7B model, in bfloat16."""
    width, layers = (64, 1) if smoke else (4096, 8)
    heads, inner = max(4, width // 128), width * 43 // 16
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).bfloat16()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.state_dict().values():
            weight.fill_(0.01)
    model.save_pretrained(folder)
    return folder


def texts_of_source(folder: Path, documents: int = 40) -> Path:
    """Return a folder with the source of a standard-library module, split into files."""
    folder.mkdir()
    source = inspect.getsource(argparse)
    size = len(source) // documents
    for number in range(documents):
        (folder / f"{number}.txt").write_text(source[number * size : (number + 1) * size], encoding="utf-8")
    return folder


def _run(*command: object) -> Callable[[], None]:
    """Return a function that runs a command, and raises with the end of its stderr if it fails."""

    def run() -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        # pip compiles packages when it installs them; with this set, each run would compile the package anew
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        process = subprocess.run(
            [*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if process.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, command))} ended with {process.returncode}:\n{process.stderr[-2000:]}"
            )

    return run
