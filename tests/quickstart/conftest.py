"""A quickstart small enough to run whole: the same code, a given model of a few thousand weights."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

import hf_posswap
from hf_posswap.quickstart import QuickstartResult, QuickstartSettings
from hf_posswap.quickstart.run import run
from hf_posswap.training import byte_tokenizer
from hf_posswap.utils.progress import Reporter


def write_gpt2(folder: Path, positions: int = 16) -> str:
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": positions}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, bos_token_id=256, eos_token_id=256, **shape))
    return str(hf_posswap.save(model, folder, tokenizer=byte_tokenizer()))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small untrained GPT-2 of bytes, with 16 positions."""
    return write_gpt2(tmp_path_factory.mktemp("small") / "gpt2")


@pytest.fixture(scope="session")
def tiny(small: str) -> QuickstartSettings:
    return QuickstartSettings(
        model=small,
        schemes=("rope", "sinusoidal"),
        steps=3,
        step_tokens=128,
        documents=4,
        training_documents=40,
        metrics=("ppl_prefix", "nll_pos"),
        continuation=8,
        device="cpu",
    )


@pytest.fixture
def console() -> Console:
    """A console without a terminal; what it got is in `console.file.getvalue()`."""
    return Console(file=io.StringIO(), width=120)


@pytest.fixture
def reporter(console: Console) -> Reporter:
    return Reporter(console)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path, tiny: QuickstartSettings) -> QuickstartResult:
    """One whole tiny quickstart, shared by the tests that only read it."""
    out = tmp_path_factory.mktemp("quickstart") / "out"
    return run(out, tiny, cache=cache, console=Console(file=io.StringIO(), width=120))
