"""Tiny checkpoints on disk, and `posswap` run in a process of its own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.forked import Ready

ROOT = Path(__file__).resolve().parents[2]
SPREAD = 0.4
"""Of random weights: wide enough that positions matter, bfloat16 or not, though nothing was trained."""
Posswap = Callable[..., "subprocess.CompletedProcess[str]"]


HEAVY = (
    *("torch", "transformers", "transformers.generation.utils", "transformers.models.gpt2.modeling_gpt2"),
    *("typer", "rich.console", "hf_posswap.cli", "hf_posswap.patching.apply.patch_model"),
    *("hf_posswap.checkpoints.load", "hf_posswap.checkpoints.save", "hf_posswap.patching.inspect.describe"),
)
"""What nearly every command imports, none of which depends on its arguments or its environment."""


def says(text: str, words: str) -> bool:
    """Return whether `text` holds `words`, wherever a terminal's width, or the length of a path, broke its lines."""
    return "".join(words.split()) in "".join(text.split())


@pytest.fixture(autouse=True)
def _odd_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands print 47 columns wide, so that no test comes to depend on the width of somebody's terminal."""
    monkeypatch.setenv("COLUMNS", "47")


@pytest.fixture(scope="session")
def posswap(tmp_path_factory: pytest.TempPathFactory) -> Posswap:
    """Return a function that runs `posswap` with its arguments in a process of its own, 80 columns wide.

    It is a fresh one where it has an environment of its own, which libraries may read when they are imported. `answers`
    is what stands on its standard input.
    """
    ready, folder, numbers = Ready(*HEAVY), tmp_path_factory.mktemp("said"), itertools.count()

    def run(*arguments: str | Path, answers: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"} | environment
        env.pop("TRANSFORMERS_VERBOSITY", None)  # as a user has it
        if not environment:
            place = folder / str(next(numbers))
            place.mkdir()
            return ready.run("hf_posswap.cli:main", list(map(str, arguments)), env, place, answers=answers)
        command = [sys.executable, "-m", "hf_posswap", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=250, input=answers)

    return run


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a GPT-2 with a learned table of 16 positions, in bfloat16."""
    torch.manual_seed(1)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 61, "n_positions": 16}
    config = GPT2Config(**size, bos_token_id=0, eos_token_id=0, initializer_range=SPREAD)
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama with RoPE, made for 32 positions."""
    torch.manual_seed(2)
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=16,
        vocab_size=61,
        max_position_embeddings=32,
        initializer_range=SPREAD,
    )
    folder = tmp_path_factory.mktemp("models") / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a BERT with a learned table of 32 positions and a tokenizer that cuts texts there."""
    from transformers import BertTokenizer

    torch.manual_seed(3)
    config = BertConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=16,
        vocab_size=9,
        max_position_embeddings=32,
        initializer_range=SPREAD,
    )
    folder = tmp_path_factory.mktemp("models") / "bert"
    BertForMaskedLM(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", "four"]
    vocabulary = {word: number for number, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary, model_max_length=32).save_pretrained(folder)
    return folder
